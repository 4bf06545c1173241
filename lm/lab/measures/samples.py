"""The samples of a run: what the model makes of the user's prompts, or of three places in the validation text.

Each prompt has a greedy continuation and one drawn with a fixed seed.
"""

import json
import logging
import re
from typing import TYPE_CHECKING

from lm.data.tokens import TextData
from lm.decoding import generate
from lm.errors import UserError
from lm.model.transformer import Transformer
from lm.system.files import write_text
from lm.training.log import SAMPLE_TOKENS, Observer, Step
from lm.training.run_directory import SAMPLE_TEMPERATURE, read_samples

if TYPE_CHECKING:
    from lm.training.train import Engine

SHOWN = 300  # characters of the first one of a finished run, about: enough to read
STRETCH = 1024  # tokens of validation text in which a prompt is looked for
PROMPT = re.compile(r"[^\W\d_].{5,58}(?!\w)")  # a line from its first letter on, in whole words
log = logging.getLogger(__name__)


def draw_samples(
    net: Transformer, data: TextData, prompts: list[str] | None, is_finished: bool = False
) -> list[dict[str, str]]:
    """Return each prompt with two continuations. Without prompts, `validation_prompts` gives them.

    If the run is finished, the continuations of the first prompt are longer: about SHOWN characters.
    """
    ids = data.val[:STRETCH].tolist() if is_finished else []
    n_first = max(SAMPLE_TOKENS, SHOWN * len(ids) // max(len(data.tokenizer.decode(ids)), 1))
    rows = list[dict[str, str]]()
    for seed, prompt in enumerate(validation_prompts(data) if prompts is None else prompts):
        n = SAMPLE_TOKENS if rows else n_first
        try:
            greedy = generate(net, data.tokenizer, prompt, n)
            drawn = generate(net, data.tokenizer, prompt, n, temperature=SAMPLE_TEMPERATURE, seed=seed)
            rows.append({"prompt": prompt, "continuation": greedy, "drawn": drawn})
        except UserError as error:
            log.warning("no continuation of %r: %s", prompt, error)
    return rows


class SamplesFile(Observer):
    """Writes a line of samples.jsonl at each validation; the last samples are in result.json.

    A resume cuts off the lines of later steps and writes these lines again.
    """

    def __init__(self, engine: "Engine") -> None:
        self.engine, self.path = engine, engine.directory.samples
        kept = [row for row in read_samples(self.path) if row["step"] <= engine.state.step]
        write_text(self.path, "".join(f"{json.dumps(row)}\n" for row in kept))

    def after_step(self, step: Step, row: dict[str, float]) -> None:
        if "val/loss" not in row:
            return
        state, run = self.engine.state, self.engine.run
        samples = draw_samples(state.eval_net, self.engine.data, run.prompts)
        line = {"step": state.step, "tokens": state.step * run.tokens_per_step, "samples": samples}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")


def validation_prompts(data: TextData) -> list[str]:
    """Up to three different prompts of up to 60 characters, from one, two and three quarters of the validation text."""
    prompts: list[str] = []
    for quarter in (1, 2, 3):
        start = len(data.val) * quarter // 4
        lines = data.tokenizer.decode(data.val[start : start + STRETCH].tolist()).splitlines()
        matches = map(PROMPT.search, lines[1:] or lines)  # the first line may begin in the middle of a word
        prompts += [match[0] for match in matches if match and match[0] not in prompts][:1]
    return prompts
