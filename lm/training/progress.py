"""What a run says on standard error: a progress bar with lines about losses and time, and of what use its text is."""

import logging
import math
import shutil
import sys
import time
from contextlib import suppress
from typing import Any

from torch import Tensor
from tqdm import tqdm

from lm.config import RunConfig, UserError
from lm.config.data import recipe_of
from lm.data.tokens import TextData
from lm.inference.generate import generate
from lm.system.terminal import duration, is_first_process, printable
from lm.training.optim import lr_factor
from lm.training.samples import NEW_TOKENS, validation_prompts
from lm.training.state import State

TIMED_STEPS = 10  # after which it is said how long the run will take
FEW_TOKENS = 5_000  # a few pages of text
MANY_EPOCHS = 10  # above which a text is learned by heart, and is so said
GOOD_EPOCHS = 4  # as good as so much new text, or nearly (Muennighoff et al., 2023)
DROPOUT_EPOCHS = 15  # with dropout, about as the recipes of short texts read them
MIN_PEAK_LR_FACTOR = 0.8  # of optim.lr, which a run reaches unless its warm-up is too long
TOKENS_PER_PARAMETER = 20  # in training, above which a larger model gains more (Hoffmann et al., 2022)
log = logging.getLogger(__name__)


def shows_bar(run: RunConfig) -> bool:
    return run.trainer.enable_progress_bar and sys.stderr.isatty() and is_first_process(run.trainer.world_size)


class Progress:
    """The bar shows tokens, the loss, tokens per second and the remaining time; the lines come without one too."""

    def __init__(self, run: RunConfig, data: TextData, state: State) -> None:
        self.run, self.data, self.state, self.first_step = run, data, state, state.step
        self.speaks = run.trainer.enable_progress_bar and is_first_process(run.trainer.world_size)
        done, total = state.step * run.tokens_per_step, run.steps * run.tokens_per_step
        off = not shows_bar(run)
        self.bar = tqdm(
            total=total, initial=done, desc="training", unit="tok", unit_scale=True, leave=False, disable=off
        )

    def update(self, loss: Tensor) -> None:
        """After a step: move the bar; soon after the start, say how long the run will take."""
        if self.bar.update(self.run.tokens_per_step):  # true when tqdm has redrawn, about ten times a second
            self.bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if not self.speaks:
            return
        made = self.state.step - self.first_step
        if made == 1:  # it may take many times as long as the others
            loss.item()  # a GPU works behind what is asked of it until a number is read
            self.first_ended = time.perf_counter()
        elif made == TIMED_STEPS and self.state.step < self.run.steps:
            loss.item()
            a_step = (time.perf_counter() - self.first_ended) / (TIMED_STEPS - 1)
            left = duration((self.run.steps - self.state.step) * a_step)
            self._write_line(f"about {left} to go, by the first {TIMED_STEPS} steps")

    def report(self, row: dict[str, float]) -> None:
        """After a validation: a line with the losses, and one with what the model writes."""
        if not self.speaks:
            return
        state, steps = self.state, self.run.steps
        left = tqdm.format_interval((steps - state.step) * state.seconds / state.step)
        losses = ", ".join(f"{key} {row[key]:.3f}" for key in ("train/loss", "val/loss"))
        self._write_line(f"step {state.step:,} of {steps:,}: {losses}, {left} left")
        for prompt in (validation_prompts(self.data) if self.run.prompts is None else self.run.prompts)[:1]:
            with suppress(UserError):  # a prompt with a character that the tokenizer lacks
                text = f"{prompt}→{generate(state.eval_net, self.data.tokenizer, prompt, NEW_TOKENS)}"
                width = shutil.get_terminal_size((100, 24)).columns - 3
                self._write_line("  " + printable(text).replace("\n", "\\n")[:width])

    def _write_line(self, text: str) -> None:
        with suppress(OSError):  # the terminal may have been closed
            tqdm.write(text, sys.stderr)


# --- what is said of the text: before the loop, and after it


def log_epochs(run: RunConfig, data: TextData) -> None:
    """Say how often the text will be read."""
    epochs = run.steps * run.tokens_per_step / len(data.train)
    too_often = epochs > MANY_EPOCHS and not run.data.overfit_batches and not run.model.dropout
    advice = ", so often that it is learned by heart: see docs/own-text.md" if too_often else ""
    log.info("the training text of %s tokens will be read %.1f times%s", f"{len(data.train):,}", epochs, advice)


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
        lower = 0.75 if run.loss_temperature == 1 else max(run.loss_temperature - 0.1, 0.2)
        return f"read {epochs:.1f} times, it makes a model too sure of itself", f"loss_temperature={lower:.2g}"
    if epochs > MANY_EPOCHS:
        return often, _length(run, GOOD_EPOCHS * n_text, tokens)
    larger = "init_from=RUN with a larger one" if run.init_from else f"model.d_model={2 * run.model.d_model}"
    return f"the model is small, {n_params:,} parameters", larger


def _length(run: RunConfig, n_tokens: int, made: int) -> str:
    """The setting by which a run of `made` tokens would have about `n_tokens`."""
    if run.max_minutes is not None:
        return f"max_minutes={float(f'{run.max_minutes * n_tokens / made:.2g}'):g}"
    return f"max_tokens={n_tokens}" if run.max_tokens else f"trainer.max_steps={-(-n_tokens // run.tokens_per_step)}"


def log_warnings(run: RunConfig, data: TextData) -> None:
    """Warn about settings that have no effect, or less than it seems."""
    if (n_tokens := len(data.train)) < FEW_TOKENS:
        log.warning("data: the training text has only %s tokens: so short a text is memorised", n_tokens)
    if run.data.document_mask and len(data.documents()) == 1:
        log.warning("data.document_mask: the training text is one document, so the mask changes nothing")
    peak = max(lr_factor(step, run.steps, run.optim) for step in range(0, run.steps, max(1, run.steps // 1000)))
    if peak < MIN_PEAK_LR_FACTOR:  # the warm-up overlaps the decay
        log.warning("optim.warmup_steps: the learning rate reaches only about %.0f %% of optim.lr", 100 * peak)
