"""What a run says on standard error while it trains: a progress bar, and above it lines about losses and time."""

import shutil
import sys
import time
from contextlib import suppress

from torch import Tensor
from tqdm import tqdm

from lm.config import RunConfig, UserError
from lm.data.tokens import TextData
from lm.inference.generate import generate
from lm.system.terminal import duration, is_first_process, printable, sparkline
from lm.training.samples import NEW_TOKENS, validation_prompts
from lm.training.state import State

TIMED_STEPS = 10  # after which it is said how long the run will take


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
        self._write_line(f"step {state.step:,} of {steps:,}: {losses} {sparkline(state.val_losses)}, {left} left")
        for prompt in (validation_prompts(self.data) if self.run.prompts is None else self.run.prompts)[:1]:
            with suppress(UserError):  # a prompt with a character that the tokenizer lacks
                text = f"{prompt}→{generate(state.eval_net, self.data.tokenizer, prompt, NEW_TOKENS)}"
                width = shutil.get_terminal_size((100, 24)).columns - 3
                self._write_line("  " + printable(text).replace("\n", "\\n")[:width])

    def _write_line(self, text: str) -> None:
        with suppress(OSError):  # the terminal may have been closed
            tqdm.write(text, sys.stderr)
