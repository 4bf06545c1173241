"""The samples of a finished run: greedy continuations of its prompts, or of three places in the validation text."""

import logging
import re

from lm.config import BadInput
from lm.data.tokens import TextData
from lm.inference.generate import generate
from lm.model.transformer import Transformer

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
