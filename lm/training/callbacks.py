"""What happens after an optimizer step: metrics, validation, a line on the terminal, a progress bar, samples."""

import json
import math
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from tqdm import tqdm

from lm.config import Diverged, RunConfig, UserError
from lm.inference.evaluate import validate
from lm.inference.generate import generate
from lm.system.files import write_text
from lm.system.terminal import duration, printable, sparkline
from lm.training.best import BestModel
from lm.training.metrics import MetricsFile, validation_metrics
from lm.training.module import LMModule
from lm.training.run_directory import read_samples
from lm.training.samples import NEW_TOKENS, samples, validation_prompts

TIMED_STEPS = 10  # after which it is said how long the run will take


class StepCallback(Callback):
    """A callback with a hook after each optimizer step: Lightning's own hook follows each micro-batch."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step_end(trainer, module, trainer.global_step)

    def on_step_end(self, trainer: Trainer, module: Any, step: int) -> None:
        """`step` optimizer steps of the run have been made, those before a resume included."""


class LogAndValidate(StepCallback):
    """Logs every `trainer.log_every_n_steps` steps and validates every `validation.every` steps.

    The last step has no row here: its row is written with the final score, after its checkpoint. `metrics` is None on
    all ranks but the first.
    """

    def __init__(self, metrics: MetricsFile | None) -> None:
        self.metrics = metrics
        self.best = BestModel()
        self.seconds = 0.0  # of training up to the last step, by all processes of the run, without the final score
        self.ended_by: str | None = None  # steps, time or patience; None while it trains
        self.step = 0
        self.resumed_from: list[int] = []
        self.last_metrics: dict[str, float] = {}  # of the last step
        self.val_losses: list[float] = []  # of all validations

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.should_stop = self.ended_by is not None  # before the checkpoint from which the run is resumed

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.started = time.perf_counter() - self.seconds  # as if one process had trained from the first step on
        module.seconds = self.seconds
        self.first_step = trainer.global_step

    def on_step_end(self, trainer: Trainer, module: LMModule, step: int) -> None:
        run = module.run
        seconds = time.perf_counter() - self.started
        module.fastest = min(module.fastest, seconds - self.seconds)
        self.step, self.seconds, module.seconds = step, seconds, seconds
        if step - self.first_step in (1, TIMED_STEPS):
            self._print_time(module, step)
        if last := module.is_last(step):
            self.ended_by = "steps" if step == run.steps else "time"
        logs = step % run.trainer.log_every_n_steps == 0 and not last
        validates = run.validation.every and step % run.validation.every == 0 and not last
        if not (logs or validates or last or step % run.checkpoint.every == 0):
            return
        metrics = step_metrics(module, step)  # raises Diverged before anything of this step is saved
        if validates:
            scores = validate(module.scored, run, module.data, max_batches=run.validation.batches)
            metrics |= validation_metrics(scores, module.data)
            self.val_losses.append(scores.loss)
            self.best.update(step, scores.loss, module.scored if run.checkpoint.best else None)
            if self._is_out_of_patience(trainer, run, step):
                last, self.ended_by = True, "patience"
        if last:
            self.last_metrics, trainer.should_stop = metrics, True
        self.seconds = time.perf_counter() - self.started  # now the device has caught up, and validation counts
        if (logs or validates) and not last and self.metrics is not None:
            self.log_row(trainer, metrics)
            if validates and run.trainer.enable_progress_bar:
                self._print(module, metrics)

    def _is_out_of_patience(self, trainer: Trainer, run: RunConfig, step: int) -> bool:
        """Whether checkpoint.patience validations have passed without a lower loss: decided by all ranks together."""
        if (patience := run.checkpoint.patience) is None:
            return False
        is_out = step - self.best.step >= patience * run.validation.every
        return bool(trainer.strategy.reduce_boolean_decision(is_out, all=False))

    def log_row(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """A row of metrics.csv, and the same for the trackers."""
        assert self.metrics is not None
        self.metrics.append(trainer.global_step, metrics)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)

    def _print_time(self, module: LMModule, step: int) -> None:
        """A line on standard error soon after the start: how long the run will take, by all steps but the first one.

        That may take many times as long as the others. A GPU works behind what is asked of it until a number is read.
        """
        run = module.run
        if self.metrics is None or not run.trainer.enable_progress_bar or run.max_minutes is not None:
            return
        module.grad_norm.item()
        now = time.perf_counter()
        if step == self.first_step + 1:
            self.first_ended = now
        elif step < run.steps:
            left = duration((run.steps - step) * (now - self.first_ended) / (TIMED_STEPS - 1))
            _write_line(f"about {left} to go, by the first {TIMED_STEPS} steps")

    def _print(self, module: LMModule, metrics: dict[str, float]) -> None:
        """Two lines on standard error, above the progress bar if there is one: losses, and what the model writes."""
        run, steps = module.run, round(module.total_steps(self.step))
        left = tqdm.format_interval((steps - self.step) * self.seconds / self.step)
        losses = ", ".join(f"{key} {metrics[key]:.3f}" for key in ("train/loss", "val/loss"))
        _write_line(f"step {self.step:,} of {steps:,}: {losses} {sparkline(self.val_losses)}, {left} left")
        for prompt in (validation_prompts(module.data) if run.prompts is None else run.prompts)[:1]:
            with suppress(UserError):  # a prompt with a character that the tokenizer lacks
                text = f"{prompt}→{generate(module.scored, module.data.tokenizer, prompt, NEW_TOKENS)}"
                width = shutil.get_terminal_size((100, 24)).columns - 3
                _write_line("  " + printable(text).replace("\n", "\\n")[:width])

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.sync()

    def state_dict(self) -> dict[str, Any]:
        names = ("step", "seconds", "ended_by", "resumed_from", "last_metrics", "val_losses")
        return {name: getattr(self, name) for name in names} | {"best": self.best.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seconds, self.last_metrics = state["step"], state["seconds"], state["last_metrics"]
        self.ended_by, self.val_losses = state["ended_by"], state["val_losses"]
        self.resumed_from = [*state["resumed_from"], self.step]
        self.best.load_state_dict(state["best"])


def _write_line(text: str) -> None:
    """On standard error, above the progress bar if there is one; its terminal may have been closed."""
    with suppress(OSError):
        tqdm.write(text, sys.stderr)


def step_metrics(module: LMModule, step: int) -> dict[str, float]:
    """The columns of a row that the training step gives. Raises Diverged if the loss or the gradient is not finite."""
    run, loss, norm = module.run, module.step_loss(), module.grad_norm.item()
    check_finite(run, f"the loss is {loss} and the gradient norm {norm} at step {step}", loss, norm)
    return {
        "tokens": step * run.tokens_per_step,
        "lr": module.lr,
        "train/loss": loss,
        "train/grad_norm": norm,
    }


def check_finite(run: RunConfig, message: str, *values: float) -> None:
    """Raise Diverged with the message if a value is not finite."""
    if not all(map(math.isfinite, values)):
        advice = f"choose optim.lr below {run.optim.lr} or a lower trainer.gradient_clip_val"
        raise Diverged(f"{message}: {advice}")


class ProgressBar(StepCallback):
    """A progress bar over the whole run, with the loss, tokens per second and the remaining time.

    Lightning's own bar shows no end for a stream of batches that has none.
    """

    def __init__(self) -> None:
        self.bar: tqdm[Any] | None = None

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        steps = (trainer.global_step, module.total_steps(trainer.global_step))
        done, total = (round(n * module.run.tokens_per_step) for n in steps)
        self.bar = tqdm(total=total, initial=done, desc="training", unit="tok", unit_scale=True, leave=False)

    def on_step_end(self, trainer: Trainer, module: LMModule, step: int) -> None:
        assert self.bar is not None
        self.bar.total = round(module.total_steps(step) * module.run.tokens_per_step)
        if self.bar.update(module.run.tokens_per_step):  # true when tqdm has redrawn, about ten times a second
            self.bar.set_postfix(loss=f"{module.micro_losses[-1].item():.3f}", refresh=False)

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if self.bar is not None:  # None if no step was left to make
            self.bar.close()


class SamplesDuringTraining(StepCallback):
    """A line of samples.jsonl for each validation but the last, whose samples are in result.json."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.is_global_zero:  # later steps will be repeated
            lines = [json.dumps(row) for row in read_samples(self.path) if row["step"] <= trainer.global_step]
            write_text(self.path, "".join(f"{line}\n" for line in lines))

    def on_step_end(self, trainer: Trainer, module: Any, step: int) -> None:
        run = module.run
        if trainer.is_global_zero and step % run.validation.every == 0 and step < run.steps:
            rows = samples(module.scored, module.data, run.prompts)
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": step, "tokens": step * run.tokens_per_step, "samples": rows}) + "\n")
