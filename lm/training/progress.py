"""What a run says on standard error: a progress bar with lines about losses and time, and of what use its text is."""

import logging
import math
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from lm.config import RunConfig, UserError
from lm.config.data import recipe_of
from lm.data.tokens import TextData
from lm.decoding import generate
from lm.lab.measures.samples import NEW_TOKENS, validation_prompts
from lm.system.terminal import duration, is_first_process, printable
from lm.training.resolve import TIMED_STEPS
from lm.training.state import State

FEW_TOKENS, FEW_SCORED = 5_000, 50  # to train on, a few pages; to score, a sentence or two
MANY_EPOCHS = 10  # above which a text is learned by heart, and is so said
GOOD_EPOCHS = 4  # as good as so much new text, or nearly (Muennighoff et al., 2023)
DROPOUT_EPOCHS = 15  # with dropout, about as the recipes of short texts read them
TOKENS_PER_PARAMETER = 20  # in training, above which a larger model gains more (Hoffmann et al., 2022)
log = logging.getLogger(__name__)


def shows_bar(run: RunConfig) -> bool:
    return run.trainer.enable_progress_bar and sys.stderr.isatty() and is_first_process(run.trainer.world_size)


def training_bar(run: RunConfig, state: State) -> Any:
    """A bar of tokens, with tokens per second and the remaining time."""
    done, total = state.step * run.tokens_per_step, run.steps * run.tokens_per_step
    options: dict[str, Any] = {"unit": "tok", "unit_scale": True, "leave": False, "disable": not shows_bar(run)}
    return tqdm(desc="training", total=total, initial=done, **options)


def log_validation(run: RunConfig, data: TextData, state: State, row: dict[str, float]) -> None:
    """Write a line with the losses of a validation, and what the model writes, above the bar if there is one."""
    left = tqdm.format_interval((run.steps - state.step) * state.seconds / state.step)
    losses = ", ".join(f"{key} {row[key]:.3f}" for key in ("train/loss", "val/loss"))
    lines = [f"step {state.step:,} of {run.steps:,}: {losses}, {left} left"]
    for prompt in (validation_prompts(data) if run.prompts is None else run.prompts)[:1]:
        with suppress(UserError):  # a prompt with a character that the tokenizer lacks
            text = f"{prompt}→{generate(state.eval_net, data.tokenizer, prompt, NEW_TOKENS)}"
            width = shutil.get_terminal_size((100, 24)).columns - 3
            lines.append("  " + printable(text).replace("\n", "\\n")[:width])
    _write_line("\n".join(lines))


class Clock:
    """Says how long a run will take, by its first steps here but for the very first one, which takes longer."""

    def __init__(self, run: RunConfig, state: State) -> None:
        self.run, self.begin, self.started = run, state.step, 0.0

    def after_step(self, state: State, loss: Tensor) -> None:
        made = state.step - self.begin
        if made not in (1, 1 + TIMED_STEPS) or state.step == self.run.steps:
            return
        loss.item()  # a GPU works behind what is asked of it until a number is read
        if made == 1:
            self.started = time.perf_counter()
            return
        seconds = (time.perf_counter() - self.started) / TIMED_STEPS
        left = duration((self.run.steps - state.step) * seconds)
        _write_line(f"about {left} to go, by the first {TIMED_STEPS} steps")


def _write_line(text: str) -> None:
    with suppress(OSError):  # the terminal may have been closed
        tqdm.write(text, sys.stderr)


# --- what is said of the text: before the loop, and after it


def log_start(run: RunConfig, data: TextData, folder: Path, n_params: int, resume_step: int) -> None:
    """Say what begins, how often it will read its text, and which settings have no effect, or less than it seems."""
    epochs = run.steps * run.tokens_per_step / len(data.train)
    too_often = epochs > MANY_EPOCHS and not run.data.overfit_batches and not run.model.dropout
    advice = ", so often that it is learned by heart: see docs/own-text.md" if too_often else ""
    readings = f"{run.steps:,} steps, which read the text of {len(data.train):,} tokens {epochs:.1f} times"
    log.info("%s: %s parameters, %s%s", folder, f"{n_params:,}", readings, advice)
    if resume_step:
        log.info("resuming from step %d", resume_step)
    if (n_tokens := len(data.train)) < FEW_TOKENS:
        log.warning("data: the training text has only %s tokens: so short a text is memorised", n_tokens)
    if (n_scored := len(data.val) - 1) < FEW_SCORED:
        log.warning("data: the validation text has only %d tokens, of which a score says little", n_scored)
    if run.data.document_mask and len(data.documents()) == 1:
        log.warning("data.document_mask: the training text is one document, so the mask changes nothing")


def log_end(run: RunConfig, data: TextData, state: State) -> None:
    """Say where training ended if that was not known at its start."""
    if state.ended_by != "steps":
        epochs = state.step * run.tokens_per_step / len(data.train)
        log.info("ended by %s after step %s: the text was read %.1f times", state.ended_by, f"{state.step:,}", epochs)


def log_baseline(run: RunConfig, data: TextData, result: dict[str, Any]) -> None:
    """Say so if the n-gram model of the same text is better, with the likeliest cause and one setting to change."""
    bits, baseline = result["val_bpb"], data.baselines.get("ngram", math.inf)
    if bits > baseline and not run.data.overfit_batches:
        comparison = "%.3f bits per byte are more than the %.3f of an n-gram model of this text: %s; try %s"
        log.warning(comparison, bits, baseline, *_likely_cause(run, data, result))


def _likely_cause(run: RunConfig, data: TextData, result: dict[str, Any]) -> tuple[str, str]:
    tokens, n_params, n_text = result["tokens"], result["n_params"], len(data.train)
    good = DROPOUT_EPOCHS if run.model.dropout else GOOD_EPOCHS
    epochs, enough = tokens / n_text, min(good * n_text, TOKENS_PER_PARAMETER * n_params)
    often = f"it was read {epochs:.1f} times, which is too often"
    if tokens < enough:
        return f"the run was short, {tokens:,} tokens", _length(run, enough, tokens)
    recipe = recipe_of(n_text * data.val_bytes / max(len(data.val), 1))
    is_other = run.tokenizer.kind == "bpe" and not run.init_from and (not run.model.dropout or "chars" in recipe)
    if is_other and epochs > GOOD_EPOCHS and recipe != "none":
        return often, f"experiment={recipe}"
    if epochs > MANY_EPOCHS and run.model.dropout:  # with which a text may be read often
        lower = f"loss_temperature={max(run.loss_temperature - 0.1, 0.2):.2g}"
        setting = lower if run.ngram_smoothing else "ngram_smoothing=0.5"
        return f"read {epochs:.1f} times, it makes a model too sure of itself", setting
    if epochs > MANY_EPOCHS:
        return often, _length(run, GOOD_EPOCHS * n_text, tokens)
    larger = "init_from=RUN with a larger one" if run.init_from else f"model.d_model={2 * run.model.d_model}"
    return f"the model is small, {n_params:,} parameters", larger


def _length(run: RunConfig, n_tokens: int, made: int) -> str:
    """The setting by which a run of `made` tokens would have about `n_tokens`."""
    if run.max_minutes is not None:
        return f"max_minutes={float(f'{run.max_minutes * n_tokens / made:.2g}'):g}"
    return f"max_tokens={n_tokens}" if run.max_tokens else f"trainer.max_steps={-(-n_tokens // run.tokens_per_step)}"
