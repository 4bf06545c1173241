"""The samples of a run: what the model makes of the user's prompts, or of three places in the validation text.

Each prompt has a greedy continuation and one drawn with a fixed seed.
"""

import json
import logging
import re
from pathlib import Path

from lm.config import RunConfig, UserError
from lm.config.run import SAMPLE_TEMPERATURE
from lm.data.tokens import TextData
from lm.inference.generate import generate
from lm.model.transformer import Transformer
from lm.system.files import write_text
from lm.training.run_directory import read_samples
from lm.training.state import State

NEW_TOKENS = 48  # of a continuation
SHOWN = 300  # characters of the first one of a finished run, about: enough to read
STRETCH = 1024  # tokens of validation text in which a prompt is looked for
PROMPT = re.compile(r"[^\W\d_].{5,58}(?!\w)")  # a line from its first letter on, in whole words
log = logging.getLogger(__name__)


def draw_samples(
    net: Transformer, data: TextData, prompts: list[str] | None, is_finished: bool = False
) -> list[dict[str, str]]:
    """The prompts, or those of `validation_prompts` if they are None, each with its two continuations.

    Those of the first prompt are longer in a run that is finished: about SHOWN characters.
    """
    ids = data.val[:STRETCH].tolist() if is_finished else []
    n_first = max(NEW_TOKENS, SHOWN * len(ids) // max(len(data.tokenizer.decode(ids)), 1))
    rows = list[dict[str, str]]()
    for seed, prompt in enumerate(validation_prompts(data) if prompts is None else prompts):
        n = NEW_TOKENS if rows else n_first
        try:
            greedy = generate(net, data.tokenizer, prompt, n)
            drawn = generate(net, data.tokenizer, prompt, n, temperature=SAMPLE_TEMPERATURE, seed=seed)
            rows.append({"prompt": prompt, "continuation": greedy, "drawn": drawn})
        except UserError as error:
            log.warning("no continuation of %r: %s", prompt, error)
    return rows


def append_samples(path: Path, state: State, run: RunConfig, data: TextData) -> None:
    """A line of samples.jsonl, for a validation during training; the last samples are in result.json."""
    line = {"step": state.step, "tokens": state.step * run.tokens_per_step}
    with open(path, "a") as file:
        file.write(json.dumps(line | {"samples": draw_samples(state.eval_net, data, run.prompts)}) + "\n")


def cut_samples(path: Path, step: int) -> None:
    """Keep the lines up to a step; those of later ones will be written again."""
    lines = [json.dumps(row) for row in read_samples(path) if row["step"] <= step]
    write_text(path, "".join(f"{line}\n" for line in lines))


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
