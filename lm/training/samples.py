"""The samples of a run: what the model makes of the user's prompts, or of three places in the validation text.

Each prompt has a greedy continuation and one drawn with a fixed seed. Prompts that the user has given are also
continued at each validation during training, into samples.jsonl.
"""

import json
import logging
import re
from pathlib import Path
from typing import Any

from lightning import Trainer

from lm.config import UserError
from lm.data.tokens import TextData
from lm.inference.generate import generate
from lm.model.transformer import Transformer
from lm.system.files import write_text
from lm.training.callbacks import StepCallback
from lm.training.run_directory import read_samples

NEW_TOKENS = 48  # of a continuation
TEMPERATURE = 0.8  # of the drawn ones, whose seed is the number of their prompt: equal seeds give similar texts
STRETCH = 1024  # tokens of validation text in which a prompt is looked for
PROMPT = re.compile(r"[^\W\d_].{5,58}(?!\w)")  # a line from its first letter on, in whole words
log = logging.getLogger(__name__)


def samples(net: Transformer, data: TextData, prompts: list[str] | None) -> list[dict[str, str]]:
    """The prompts, or those of `validation_prompts` if they are None, each with its two continuations."""
    rows = []
    for seed, prompt in enumerate(validation_prompts(data) if prompts is None else prompts):
        try:
            greedy = generate(net, data.tokenizer, prompt, NEW_TOKENS)
            drawn = generate(net, data.tokenizer, prompt, NEW_TOKENS, temperature=TEMPERATURE, seed=seed)
            rows.append({"prompt": prompt, "continuation": greedy, "drawn": drawn})
        except UserError as error:
            log.warning("no continuation of %r: %s", prompt, error)
    return rows


def validation_prompts(data: TextData) -> list[str]:
    """Up to three different prompts of up to 60 characters, from one, two and three quarters of the validation text."""
    prompts: list[str] = []
    for quarter in (1, 2, 3):
        start = len(data.val) * quarter // 4
        text = data.tokenizer.decode(data.val[start : start + STRETCH].tolist())
        lines = text.split("\n")[1:] or [text]  # the first line may begin in the middle of a word
        matches = (PROMPT.search(line) for line in lines)
        prompts += [match[0] for match in matches if match and match[0] not in prompts][:1]
    return prompts


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
