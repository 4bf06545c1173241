"""The samples of a finished run: greedy continuations of its prompts, or of three places in the validation text.

Prompts that the user has given are also continued at each validation during training, into samples.jsonl.
"""

import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer

from lm.config import BadInput
from lm.data.tokens import TextData
from lm.inference.generate import generate
from lm.model.transformer import Transformer
from lm.system.files import write_text
from lm.training.finished import SamplesAt, read_samples

NEW_TOKENS = 48  # of a continuation
STRETCH = 4096  # tokens of validation text in which a prompt is searched for
STARTS = (  # what precedes a prompt, the best first; group 1 is the indentation, of which the least is best
    r"\n[^\S\n]*\n+([^\S\n]*)(?=\S)",  # a blank line: the beginning of a paragraph or a function
    r"\n([^\S\n]*)(?=\S)",  # a line break
    r"[.!?]\s+()",  # the end of a sentence
    r"\s+()",
    r"^\ufffd*()",  # nothing; a stretch may begin inside a character
)
PROMPT = re.compile(r".{1,60}(?!\S)|.{1,60}(?!\w)|.{1,60}")  # up to 60 characters of a line, in whole words
log = logging.getLogger(__name__)


def samples(net: Transformer, data: TextData, prompts: list[str] | None) -> list[dict[str, str]]:
    """The prompts, or those of `validation_prompts` if they are None, each with its continuation."""
    found = []
    for prompt in validation_prompts(data) if prompts is None else prompts:
        try:
            found.append({"prompt": prompt, "continuation": generate(net, data.tokenizer, prompt, NEW_TOKENS)})
        except BadInput as error:
            log.warning("no continuation of %r: %s", prompt, error)
    return found


def validation_prompts(data: TextData) -> list[str]:
    """Up to three different prompts, from one, two and three quarters of the validation text."""
    prompts: list[str] = []
    for quarter in (1, 2, 3):
        first = len(data.val) * quarter // 4
        text = data.tokenizer.decode(data.val[first : first + STRETCH].tolist())
        whole = first + STRETCH >= len(data.val)  # else its last word may be cut
        found = (sorted(re.finditer(pattern, text), key=lambda match: len(match[1])) for pattern in STARTS)
        starts = (match.end() for matches in found for match in matches)
        ends = (match for start in starts if (match := PROMPT.match(text, start)))
        candidates = (match[0].rstrip() for match in ends if whole or match.end() < len(text))
        prompts += [next((one for one in candidates if one not in prompts and readable(one)), "")]
    return [prompt for prompt in prompts if prompt]


def readable(prompt: str) -> bool:
    """Whether it says something: six characters with a word, and no ruler such as ##### or -----."""
    return len(prompt) > 5 and re.search(r"\w\w", prompt) is not None and re.search(r"([^\w\s])\1{4}", prompt) is None


class SamplesDuringTraining(Callback):
    """A line of samples.jsonl for each validation but the last, whose samples are in result.json."""

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path, self.tokens_per_step = path, tokens_per_step

    def on_train_start(self, trainer: Trainer, task: Any) -> None:
        if trainer.is_global_zero:  # later steps will be repeated
            write_text(self.path, self.until(trainer.global_step))

    def until(self, step: int) -> str:
        return "".join(as_line(one) for one in read_samples(self.path) if one.step <= step) if step else ""

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, run = trainer.global_step, task.run
        if (batch_idx + 1) % trainer.accumulate_grad_batches or not trainer.is_global_zero:
            return
        if step % run.validation.every == 0 and step < task.total_steps:
            found = samples(task.net, task.data, run.prompts)
            with open(self.path, "a") as file:
                file.write(as_line(SamplesAt(step=step, tokens=step * self.tokens_per_step, samples=found)))


def as_line(found: SamplesAt) -> str:
    return json.dumps(asdict(found)) + "\n"
