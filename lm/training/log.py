"""What a run reports while it trains: rows of metrics.csv, a bar and lines on standard error.

An `Observer` watches the loop. The lab has further observers: diagnostics of the embedding, samples.
"""

import csv
import logging
import math
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from tqdm import tqdm

from lm.config import RunConfig
from lm.data.tokens import TextData
from lm.decoding import generate
from lm.errors import UserError, reading
from lm.registry import from_lab
from lm.scoring import Scores
from lm.system.files import csv_text, write_text
from lm.system.terminal import duration, is_first_process, printable
from lm.training.run_directory import read_rows
from lm.training.state import State

COLUMNS = (
    "step",
    "tokens",
    "lr",
    "train/loss",
    "train/grad_norm",
    "val/loss",
    "val/bpb",
    "val/top1",
    "val/tokens",
)
SAMPLE_TOKENS = 48  # of a continuation
TIMED_STEPS = 10  # that tell how long a run takes, after the first step, which is slower
FEW_TOKENS, FEW_SCORED = 5_000, 50  # a few pages to train on; a sentence or two to score
MANY_EPOCHS = 10  # above which a model usually memorises its text
log = logging.getLogger(__name__)


class Step(NamedTuple):
    """An optimizer step: its number, the learning rate, the loss, the norm of the gradient before clipping."""

    number: int  # from 1 on
    lr: float
    loss: Tensor
    norm: Tensor


class Observer:
    """What watches the loop of a run, and changes no number of the run."""

    def before_clip(self) -> None:
        """Look at the gradients after the last backward pass of a step."""

    def after_step(self, step: Step, row: dict[str, float]) -> None:
        """Look at a step that was made; `row` is what is logged of the step, {} if nothing is logged.

        The row of the last step is {} too, because `finish` writes that row, with the final score.
        """


def validation_metrics(scores: Scores, data: TextData) -> dict[str, float]:
    """Return scores as columns. Bits per byte of an estimate take the bytes per token of the whole text."""
    n_bytes = data.val_bytes * (scores.n_tokens / data.n_targets)
    return {
        "val/loss": scores.loss,
        "val/bpb": scores.bpb(n_bytes),
        "val/top1": scores.top1,
        "val/tokens": scores.n_tokens,
    }


class MetricsFile(Observer):
    """A CSV file with one row for each logged step, in order. A resume neither repeats nor omits a row.

    The rows hold no times, so a repeated run has the same file. Rows of an existing file up to `resume_step` are kept.
    Trackers (`loggers`) get a copy of each row.
    """

    def __init__(
        self,
        path: Path,
        resume_step: int = 0,
        loggers: Sequence[Any] = (),
        columns: Sequence[str] = COLUMNS,
    ) -> None:
        self.path, self.loggers, self.columns = path, loggers, columns
        rows = read_rows(path) if resume_step else []
        with reading(path):  # a person may have edited the file
            rows = [row for row in rows if int(row["step"]) <= resume_step]
        write_text(path, csv_text(columns, rows))

    def append(self, step: int, row: dict[str, float]) -> None:
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writerow({"step": step, **row})
        for logger in self.loggers:
            logger.log_metrics(row, step)

    def after_step(self, step: Step, row: dict[str, float]) -> None:
        if row:
            self.append(step.number, row)


# --- standard error


def shows_bar(run: RunConfig) -> bool:
    is_wanted = run.trainer.enable_progress_bar and sys.stderr.isatty()
    return is_wanted and is_first_process(run.trainer.world_size)


class Progress(Observer):
    """A bar of tokens, the time that the run will take, and a line at each validation."""

    def __init__(self, run: RunConfig, data: TextData, state: State) -> None:
        self.run, self.data, self.state = run, data, state
        self.begin, self.started = state.step, 0.0
        self.bar: Any = tqdm(
            desc="training",
            total=run.steps * run.tokens_per_step,
            initial=state.step * run.tokens_per_step,
            unit="tok",
            unit_scale=True,
            leave=False,
            disable=not shows_bar(run),
        )

    def after_step(self, step: Step, row: dict[str, float]) -> None:
        if self.bar.update(self.run.tokens_per_step):  # true when tqdm has redrawn, ten times a second
            self.bar.set_postfix(loss=f"{step.loss.item():.3f}", refresh=False)
        if self.state.ended_by:
            self.bar.close()
        elif self.run.trainer.enable_progress_bar:
            self._estimate(step)
            if "val/loss" in row:
                self._write_validation(row)

    def _estimate(self, step: Step) -> None:
        """Say how long the run will take, from the time of TIMED_STEPS steps after the first one, which is slower."""
        made = self.state.step - self.begin
        if made not in (1, 1 + TIMED_STEPS):
            return
        step.loss.item()  # a GPU works behind what is asked of it until a number is read
        now = time.perf_counter()
        if made == 1:
            self.started = now
            return
        seconds = (now - self.started) / TIMED_STEPS
        left = duration((self.run.steps - self.state.step) * seconds)
        _write_line(f"about {left} to go, estimated from the first {TIMED_STEPS} steps")

    def _write_validation(self, row: dict[str, float]) -> None:
        """Write the losses of a validation, and what the model writes."""
        run, state = self.run, self.state
        left = tqdm.format_interval((run.steps - state.step) * state.seconds / state.step)
        losses = ", ".join(f"{key} {row[key]:.3f}" for key in ("train/loss", "val/loss"))
        _write_line(f"step {state.step:,} of {run.steps:,}: {losses}, {left} left")
        find_prompts = from_lab("lm.lab.measures.samples.validation_prompts", default=lambda data: [])
        prompts = run.prompts if run.prompts is not None else find_prompts(self.data)
        for prompt in prompts[:1]:
            with suppress(UserError):  # a prompt with a character that the tokenizer lacks
                text = generate(state.eval_net, self.data.tokenizer, prompt, SAMPLE_TOKENS)
                line = f'  after "{prompt}" the model writes: {text}'
                width = shutil.get_terminal_size((100, 24)).columns - 1
                _write_line(printable(line).replace("\n", "\\n")[:width])


def _write_line(text: str) -> None:
    with suppress(OSError):  # the terminal may have been closed
        tqdm.write(text, sys.stderr)


def readings(run: RunConfig, data: TextData, steps: int) -> tuple[int, float]:
    """Return the number of distinct tokens that `steps` steps read, and how often the steps read each of them."""
    n_tokens = min(len(data.train), run.data.overfit_batches * run.tokens_per_step or len(data.train))
    return n_tokens, steps * run.tokens_per_step / n_tokens


def log_start(run: RunConfig, data: TextData, folder: Path, n_params: int, resume_step: int) -> None:
    """Say what begins, how often it will read its text, and which settings have no effect."""
    n_tokens, epochs = readings(run, data, run.steps)
    memorises = epochs > MANY_EPOCHS and not run.data.overfit_batches and not run.model.dropout
    usual = f"A model usually memorises a text that it reads more than {MANY_EPOCHS} times; see docs/own-text.md"
    advice = f". {usual}" if memorises else ""
    plan = f"{run.steps:,} steps read the {n_tokens:,} training tokens {epochs:.1f} times"
    log.info("%s: %s parameters; %s%s", folder, f"{n_params:,}", plan, advice)
    if resume_step:
        log.info("resuming from step %d", resume_step)
    if (n_steps := run.optim.warmup_steps) >= run.steps:
        log.warning("optim.warmup_steps=%d: the run ends before its learning rate reaches its peak", n_steps)
    if (n_tokens := len(data.train)) < FEW_TOKENS:
        log.warning("data: the training text has only %s tokens; a model memorises so short a text", f"{n_tokens:,}")
    if (n_scored := len(data.val) - 1) < FEW_SCORED:
        log.warning("data: the validation text has only %s tokens, too few for a reliable score", f"{n_scored:,}")
    if run.data.document_mask and len(data.document_starts()) == 1:
        log.warning("data.document_mask: the training text is one document, so the mask changes nothing")


def log_baseline(result: dict[str, Any]) -> None:
    """Say so if counting in the same text gives a better score than the model."""
    bits, baseline = result["val_bpb"], result["baselines_bpb"].get("ngram", math.inf)
    if bits > baseline:
        log.warning(
            "an n-gram model of the text is better: %.3f bits per byte, and this model has %.3f; "
            "see docs/own-text.md#if-the-n-gram-model-is-better",
            baseline,
            bits,
        )
