"""Weights as safetensors: one file is written; a Hugging Face folder has model.safetensors, or several and an index."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lm.config import UserError
from lm.config.checks import reading
from lm.exchange.architectures import ARCHITECTURES
from lm.exchange.find_model import INDEX, ModelSettings
from lm.exchange.tensor_names import Stacked, Weights
from lm.model.transformer import Transformer
from lm.system.files import atomic_file, read_json

NOT_WEIGHTS = re.compile(r".*(rotary_emb\.inv_freq|attn\.(masked_)?bias)")  # constants that some files hold
EMBEDDING, OWN_HEAD = "embed.weight", "head.proj.weight"


def write_weights(path: Path, weights: Weights) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with atomic_file(path) as file:
        file.write(save(whole, {"format": "pt"}))


class Source(NamedTuple):
    """A tensor of a safetensors file, and the parameters of ours that it holds."""

    size: int
    head: bool  # lm_head.weight: compared with the embedding, if the model is tied
    name: str
    path: Path
    shape: list[int]
    ours: Stacked = Stacked(())

    def read(self) -> Tensor:
        with safe_open(self.path, "pt") as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor.T if self.ours.transposed else tensor


def sources(settings: ModelSettings, folder: Path) -> tuple[list[Source], Transformer]:
    """Where each parameter lies, and the model that has them, on the meta device.

    Raises UserError naming a tensor that is missing, superfluous or of another shape, before memory is taken for any.
    """
    architecture = next(one for one in ARCHITECTURES if one.name == settings.architecture)
    present, config = contents(folder), settings.model
    if config.n_layers > len(present):
        raise UserError(
            f"{folder}: holds {len(present)} tensors, too few for the {config.n_layers} layers of config.json"
        )
    try:
        with torch.device("meta"):
            net = Transformer(config, settings.head, vocab_size=settings.vocab_size, seq_len=settings.seq_len)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise UserError(f"{folder / 'config.json'}: {str(error).splitlines()[0]}; expected sizes of a model") from error
    parameters = dict(net.named_parameters())
    expected = architecture.names([name for name in parameters if name != OWN_HEAD], config)
    missing, found = set(expected) | ({"lm_head.weight"} if OWN_HEAD in parameters else set()), []
    for one in present:
        name = full_name(one.name, expected)
        if not one.head and name not in expected:
            if NOT_WEIGHTS.fullmatch(name):
                continue
            raise UserError(f"{folder}: holds a tensor {name} that {architecture.name} does not have")
        ours = expected[name] if name in expected else Stacked((OWN_HEAD if OWN_HEAD in parameters else EMBEDDING,))
        shapes = [parameters[part].shape for part in ours.names]
        shape = [sum(part[0] for part in shapes), *shapes[0][1:]]
        if one.shape != (shape[::-1] if ours.transposed else shape):
            raise UserError(f"{folder}: {name} has the shape {one.shape}, which config.json does not fit")
        found.append(one._replace(ours=ours))
        missing.discard(name)
    if missing:
        raise UserError(f"{folder}: the tensor {min(missing)} is missing")
    return sorted(found), net


@torch.no_grad()
def fill(net: Transformer, found: list[Source], folder: Path) -> None:
    """Read every parameter, one tensor at a time.

    The pages of a file that were read count as memory until it is closed, so it is opened for each tensor. With the
    largest first, while the rest of the model has no pages yet, the peak is near the model's size; a copy of the
    embedding as the head comes after it.
    """
    parameters = dict(net.named_parameters())
    for one in found:
        with refusing_damage(folder):
            tensor = one.read()
        if one.head and OWN_HEAD not in parameters and not torch.equal(tensor.float(), net.embed.weight):
            raise UserError(f"{folder}: lm_head.weight differs from the embedding, but tie_word_embeddings is true")
        parts = [parameters[name] for name in one.ours.names]
        for part, piece in zip(parts, torch.split(tensor, [len(part) for part in parts]), strict=True):
            part.copy_(piece)


def full_name(name: str, expected: dict[str, Any]) -> str:
    """The name with the prefix that a file of the bare model, as that of GPT-2, leaves out."""
    prefix = next(iter(expected)).partition(".")[0]
    return f"{prefix}.{name}" if f"{prefix}.{name}" in expected else name


def shards(folder: Path) -> list[str]:
    """The names of the files with the weights. Raises UserError if their index is damaged."""
    index = folder / INDEX
    if not index.is_file():
        return ["model.safetensors"]
    with reading(index, "the index of the safetensors files"):
        names = set(read_json(index)["weight_map"].values())
        if any(Path(one).name != one for one in names):
            raise UserError("names a file outside of its folder")
        return sorted(names)


@contextmanager
def refusing_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        what = str(error).splitlines()[0]
        raise UserError(f"{folder}: {what}; expected model.safetensors, or its parts and their index") from error


def contents(folder: Path) -> list[Source]:
    """The tensors of all safetensors files of the folder; no tensor is read."""
    found = []
    with refusing_damage(folder):
        for path in (folder / one for one in shards(folder)):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    shape = file.get_slice(name).get_shape()
                    found.append(Source(-math.prod(shape), name == "lm_head.weight", name, path, shape))
    return found
