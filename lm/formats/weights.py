"""Tensors as a safetensors file."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save
from torch import Tensor

from lm.config import UserError
from lm.system.files import atomic_file

Weights = dict[str, Tensor]


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a file atomically. `safetensors.torch.save_file` would replace `path` by a file that is not synced yet."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with atomic_file(path) as file:
        file.write(save(whole, {"format": "pt"}))


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
