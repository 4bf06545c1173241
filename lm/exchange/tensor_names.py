"""The names of our tensors in the architectures of transformers."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from lm.config import ModelConfig

Weights = dict[str, Tensor]


class Stacked(NamedTuple):
    """Our tensors that are one tensor of theirs: joined along the first dimension, then perhaps transposed."""

    names: tuple[str, ...]
    transposed: bool = False


def renamed(*pairs: tuple[str, str]) -> Callable[[Iterable[str], ModelConfig], dict[str, Stacked]]:
    """Names that differ in parts: each pair is a part of our name, with the dots around it, and of theirs."""

    def names(ours: Iterable[str], config: ModelConfig) -> dict[str, Stacked]:
        found = {}
        for name in ours:
            theirs = f".{name}"
            for part, other in pairs:
                theirs = theirs.replace(f".{part}.", f".{other}.", 1)
            found[f"model{theirs}"] = Stacked((name,))
        return found

    return names


def gpt2_names(ours: Iterable[str], config: ModelConfig) -> dict[str, Stacked]:
    """GPT-2 stores matrices as (in, out), and those of q, k and v as one."""
    found = {
        "transformer.wte.weight": Stacked(("embed.weight",)),
        "transformer.wpe.weight": Stacked(("position.weight",)),
    }
    for kind in ("weight", "bias"):
        found[f"transformer.ln_f.{kind}"] = Stacked((f"norm.{kind}",))
        for i in range(config.n_layers):
            here, there, matrix = f"blocks.{i}", f"transformer.h.{i}", kind == "weight"
            qkv = tuple(f"{here}.attn.{one}_proj.{kind}" for one in "qkv")
            found |= {
                f"{there}.ln_1.{kind}": Stacked((f"{here}.attn_norm.{kind}",)),
                f"{there}.ln_2.{kind}": Stacked((f"{here}.ffn_norm.{kind}",)),
                f"{there}.attn.c_attn.{kind}": Stacked(qkv, matrix),
                f"{there}.attn.c_proj.{kind}": Stacked((f"{here}.attn.o_proj.{kind}",), matrix),
                f"{there}.mlp.c_fc.{kind}": Stacked((f"{here}.ffn.up_proj.{kind}",), matrix),
                f"{there}.mlp.c_proj.{kind}": Stacked((f"{here}.ffn.down_proj.{kind}",), matrix),
            }
    return found


def as_gpt2(weights: Weights, config: ModelConfig) -> Weights:
    """With keys and values for each query head, and with all biases."""
    found = {}
    for name, tensor in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            by_head = tensor.view(config.kv_heads, config.head_dim, *tensor.shape[1:])
            tensor = by_head.repeat_interleave(config.n_heads // config.kv_heads, 0).flatten(0, 1)
        found[name] = tensor
    return {
        name.removesuffix("weight") + "bias": tensor.new_zeros(tensor.shape[0])
        for name, tensor in found.items()
        if name.startswith(("blocks.", "norm."))
    } | found
