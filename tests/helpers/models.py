"""Tiny models of every part, chosen so that each pair of choices occurs in one of them."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from conftest import EVERY_HEAD, SEQ, VOCAB, tiny
from safetensors.torch import load_file
from torch import Tensor

from lm.config import FFNS, NORM_ORDERS, NORMS, POSITIONS, HeadConfig, ModelConfig
from lm.model import Transformer

AXES: dict[str, Sequence[Any]] = {
    "kind": tuple(EVERY_HEAD),
    "ffn": FFNS,
    "position": POSITIONS,
    "norm": NORMS,
    "norm_order": NORM_ORDERS,
    "qk_norm": (False, True),
    "bias": (False, True),
    "n_kv_heads": (None, 1),
}


def pairwise(
    axes: Mapping[str, Sequence[Any]], apart: set[tuple[str, str]], never: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Choices in which each pair of values of two axes occurs, but for the axes in `apart` and the values `never`."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return {pair for pair in combinations(zip(axes, row, strict=True), 2) if (pair[0][0], pair[1][0]) not in apart}

    rows = (row for row in product(*axes.values()) if not never.items() <= dict(zip(axes, row, strict=True)).items())
    candidates = {row: pairs(row) for row in rows}
    missing, chosen = set().union(*candidates.values()), []
    while missing:
        row = max(candidates, key=lambda row: len(candidates[row] & missing))
        missing -= candidates[row]
        chosen.append(dict(zip(axes, row, strict=True)))
    return chosen


MODELS = pairwise(AXES, apart={("kind", "ffn")}, never={"norm": "none", "qk_norm": True})  # a head sees no FFN


def build(
    kind: str | HeadConfig = "untied", seq_len: int = SEQ, seed: int = 0, separator: int | None = None, **changes: Any
) -> Any:
    """A tiny model: `kind` is a key of EVERY_HEAD or a head of its own, `changes` are those of its ModelConfig."""
    head = kind if isinstance(kind, HeadConfig) else EVERY_HEAD[kind]
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "seq_len": seq_len, "document_separator": separator}
    return Transformer(tiny(**changes), head, seed=seed, **sizes)


def noisy(config: ModelConfig, head: str, vocab_size: int, seq_len: int = SEQ) -> Transformer:
    """A model in which nothing is zero, one or a copy, which would hide a swapped norm, bias or matrix."""
    net = Transformer(config, EVERY_HEAD[head], vocab_size=vocab_size, seq_len=seq_len).eval()
    noise = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=noise) * 0.1)
    return net


def name_of(model: dict[str, Any]) -> str:
    return "-".join(map(str, model.values()))


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def gradients(net: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def weights(run_dir: Path) -> dict[str, Tensor]:
    return load_file(run_dir / "model/model.safetensors")
