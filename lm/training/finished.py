"""Reading the result.json of a finished run, and the samples of its training. It imports nothing heavy."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lm.config import BadInput, at_least
from lm.config.checks import reading
from lm.config.typed import build
from lm.system.files import read_json, read_json_lines

UNKNOWN = "unknown"


@dataclass(slots=True, kw_only=True)
class Result:
    """What tables and reports read of a result.json, which may hold more; docs/data.md describes it."""

    val_loss: float
    val_bpb: float
    val_top1: float
    baselines_bpb: dict[str, float]
    n_params: int
    n_params_by_role: dict[str, int]
    flops_per_token: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    seed: int
    head: str
    resumed_from: list[int]
    config_hash: str
    data_hash: str
    tokenizer_hash: str
    threads: int
    device: str
    precision: str
    python: str
    versions: dict[str, str]
    samples: list[dict[str, str]]
    cpu: str
    n_params_trained: int
    val_tokens: int
    val_bytes: int
    train_text_tokens: int

    def __post_init__(self) -> None:
        at_least(0, "", self, "val_loss", "val_bpb", "val_top1", "seconds", "tokens_per_second")
        at_least(1, "", self, "train_text_tokens")
        if any(one.keys() != {"prompt", "continuation"} for one in self.samples):
            raise BadInput("samples: expected a prompt and a continuation in each")


NAMES = [one.name for one in fields(Result)]


def read_result(path: Path) -> dict[str, Any] | None:
    """The content of a result.json, None if there is none: the run is not finished. Raises BadInput naming the file."""
    try:
        with reading(path):
            found = read_json(path)
            for name in NAMES:
                if name not in found:
                    raise BadInput(f"{name}: is missing")
            build(Result, {name: found[name] for name in NAMES})
            return found
    except (FileNotFoundError, NotADirectoryError):
        return None


@dataclass(slots=True, kw_only=True)
class SamplesAt:
    """A line of samples.jsonl: the prompts and their greedy continuations after so many steps of training."""

    step: int
    tokens: int
    samples: list[dict[str, str]]


def read_samples(path: Path) -> list[SamplesAt]:
    """The whole lines of a samples.jsonl; none if there is no such file. Raises BadInput naming the file."""
    try:
        with reading(path):
            return [build(SamplesAt, row) for row in read_json_lines(path)]
    except FileNotFoundError:
        return []
