"""Tensors as a safetensors file."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from lm.config import UserError
from lm.system.files import atomic_file

Weights = dict[str, Tensor]


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a file atomically, one tensor after another.

    `safetensors.torch.save` would need the whole file in memory. `save_file` replaces `path` before it is synced, by a
    file that only its owner may read, and what a kill leaves of that has a name of its own.
    """
    order = sorted(weights, key=lambda name: (-weights[name].element_size(), name))  # which aligns every tensor
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + weights[name].numel() * weights[name].element_size()
        dtype, shape = _name_of(weights[name].dtype), list(weights[name].shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with atomic_file(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            values = weights[name].detach().cpu().contiguous().reshape(-1)
            file.write(values.view(torch.uint8).numpy().data)


def _name_of(dtype: torch.dtype) -> str:
    """As the format names it, in a file of one number: the library has no public table."""
    content = save({"x": torch.zeros(1, dtype=dtype)})
    return str(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["x"]["dtype"])


def read_weights(path: Path, expected: Mapping[str, Tensor]) -> Weights:
    """The tensors of a file, each in memory of its own and in the precision of `expected`, which may lie on "meta".

    Raises ValueError, before memory is taken, for a tensor that is missing, superfluous or of another shape.
    """
    stored = load_file(path)  # maps the file
    for name in sorted(expected.keys() | stored.keys()):
        shapes = [tuple(weights[name].shape) if name in weights else None for weights in (stored, expected)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name}: {path.name} has the shape {shapes[0]}, the settings give {shapes[1]}")
    return {name: tensor.to(expected[name].dtype, copy=True) for name, tensor in stored.items()}


def check_finite(name: str, values: np.ndarray, dtype: str) -> None:
    """Raise UserError if numbers of a tensor have become infinite in the dtype of an export."""
    if not np.isfinite(values).all():
        raise UserError(f"dtype={dtype}: {name} has numbers beyond it; expected finite ones, up to 65,504 in f16")
