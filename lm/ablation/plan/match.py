"""Settings changed by name, and the width that gives an arm the parameters of another."""

from dataclasses import replace
from typing import Any

import torch

from lm.config import RunConfig, UserError
from lm.model.size import n_params
from lm.model.transformer import Transformer

SAME_SIZE = 0.01  # how near a matched arm comes to its baseline's parameters


def change(run: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The run with dotted keys set; checked as if they had been typed."""
    groups: dict[str, dict[str, Any]] = {"": {}}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = value
    own = groups.pop("")
    return replace(run, **own, **{group: replace(getattr(run, group), **found) for group, found in groups.items()})


def meta_model(run: RunConfig, vocab_size: int) -> Transformer:
    """The model on the meta device: shapes without values."""
    with torch.device("meta"):
        return Transformer(run.model, run.head, vocab_size=vocab_size, seq_len=run.data.seq_len)


def match_parameters(run: RunConfig, vocab_size: int, key: str, target: int) -> dict[str, int]:
    """The value of the integer setting `key` with which a run's parameters come nearest to `target`.

    Raises UserError if that is not within SAME_SIZE.
    """
    unit = 2 * run.model.n_heads if key == "model.d_model" else 1  # whole heads of even width

    def count(value: int) -> int:
        return n_params(meta_model(change(run, {key: value * unit}), vocab_size))

    low, high = 1, 2
    while count(high) < target:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < target else (low, middle)
    best = min((low, high), key=lambda value: abs(count(value) - target))
    if abs(count(best) / target - 1) > SAME_SIZE:
        near = f"{key}={best * unit} gives {count(best):,} parameters, the nearest to {target:,}"
        raise UserError(f"ablation.match_parameters: {near}; match by a finer setting (model.d_ff)")
    return {key: best * unit}
