"""Which architecture of transformers computes the same as a model of this project, and under which names.

The weights are the same tensors under other names, so the logits are the same too. Each architecture is described once;
the export reads the description from left to right, the import from right to left.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from lm.config import ModelConfig, UserError
from lm.formats.weights import Weights

Settings = dict[str, Any]
ACTIVATIONS = {"swiglu": "silu", "relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Stacked(NamedTuple):
    """Our tensors that are one tensor of theirs: joined along the first dimension, then perhaps transposed."""

    names: tuple[str, ...]
    transposed: bool = False


class Architecture(NamedTuple):
    name: str  # the class in transformers
    model_type: str
    keys: dict[str, str]  # our setting -> theirs; the context length is ours as seq_len
    accepts: dict[str, tuple[object, ...]]  # our setting -> its possible values; other settings may have any value
    names: Callable[[Iterable[str], ModelConfig], dict[str, Stacked]]  # of the tensors: theirs -> ours
    constants: Settings  # written by the export
    prepare: Callable[[Weights, ModelConfig], Weights] = lambda weights, config: weights  # before the export

    def unsupported(self, config: ModelConfig) -> list[str]:
        """The settings whose values the architecture does not have."""
        settings = _resolved(config)
        keys = [key for key, values in self.accepts.items() if settings[key] not in values]
        square = config.n_heads * config.head_dim == config.d_model
        return keys if square or "d_head" in self.keys else [*keys, "d_head"]

    def settings(self, config: ModelConfig, seq_len: int) -> Settings:
        """What config.json says of a model."""
        settings = _resolved(config) | {"seq_len": seq_len, "ffn": ACTIVATIONS[config.ffn]}
        renamed = {"model_type": self.model_type, **{name: settings[key] for key, name in self.keys.items()}}
        return renamed | self.constants | (_rope_settings(config) if config.position == "rope" else {})

    def weights(self, weights: Weights, config: ModelConfig) -> Weights:
        """Our weights, without the head's, under their names."""
        weights, renamed = self.prepare(weights, config), Weights()
        for name, stacked in self.names(weights, config).items():
            tensors = [weights[part] for part in stacked.names]
            tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            renamed[name] = tensor.T if stacked.transposed else tensor
        return renamed


def architecture_of(config: ModelConfig, among: Sequence[Architecture] | None = None, where: str = "") -> Architecture:
    """The first architecture that computes the same. Raises UserError naming the setting that none has."""
    among = among or ARCHITECTURES
    for architecture in among:
        if not architecture.unsupported(config):
            return architecture
    nearest = min(among, key=lambda other: [key in other.unsupported(config) for key in DISTINGUISHING])
    key = nearest.unsupported(config)[0]
    setting = f"{where}model.{key}={str(getattr(config, key)).lower()}"
    raise UserError(f"{setting}: cannot be exported, {nearest.name} does not support it; see docs/model.md")


# --- settings


def _resolved(config: ModelConfig) -> Settings:
    """Every setting, with a value in the place of each null that stands for another setting's."""
    return asdict(config) | {
        "n_kv_heads": config.kv_heads,
        "d_head": config.head_dim,
        "attention_bias": config.attn_bias,
    }


def _rope_settings(config: ModelConfig) -> Settings:
    scaled = dict(zip(SCALING, config.rope_scaling or (), strict=bool(config.rope_scaling)))
    scaling = {"rope_type": "llama3", **scaled} if scaled else {"rope_type": "default"}
    return {
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # this key and the next are for transformers 4
        "rope_scaling": scaling if scaled else None,
    }


# --- names of tensors


def _renamed(*pairs: tuple[str, str]) -> Callable[[Iterable[str], ModelConfig], dict[str, Stacked]]:
    """Names that differ in parts: each pair is a part of our name, with the dots around it, and of theirs."""

    def names(own_names: Iterable[str], config: ModelConfig) -> dict[str, Stacked]:
        names = {}
        for name in own_names:
            other = f".{name}"
            for part, replacement in pairs:
                other = other.replace(f".{part}.", f".{replacement}.", 1)
            names[f"model{other}"] = Stacked((name,))
        return names

    return names


def _gpt2_names(own_names: Iterable[str], config: ModelConfig) -> dict[str, Stacked]:
    """GPT-2 stores matrices as (in, out), and those of q, k and v as one."""
    names = {
        "transformer.wte.weight": Stacked(("embed.weight",)),
        "transformer.wpe.weight": Stacked(("position.weight",)),
    }
    for kind in ("weight", "bias"):
        names[f"transformer.ln_f.{kind}"] = Stacked((f"norm.{kind}",))
        for i in range(config.n_layers):
            block, layer, matrix = f"blocks.{i}", f"transformer.h.{i}", kind == "weight"
            qkv = tuple(f"{block}.attn.{letter}_proj.{kind}" for letter in "qkv")
            names |= {
                f"{layer}.ln_1.{kind}": Stacked((f"{block}.attn_norm.{kind}",)),
                f"{layer}.ln_2.{kind}": Stacked((f"{block}.ffn_norm.{kind}",)),
                f"{layer}.attn.c_attn.{kind}": Stacked(qkv, matrix),
                f"{layer}.attn.c_proj.{kind}": Stacked((f"{block}.attn.o_proj.{kind}",), matrix),
                f"{layer}.mlp.c_fc.{kind}": Stacked((f"{block}.ffn.up_proj.{kind}",), matrix),
                f"{layer}.mlp.c_proj.{kind}": Stacked((f"{block}.ffn.down_proj.{kind}",), matrix),
            }
    return names


def _as_gpt2(weights: Weights, config: ModelConfig) -> Weights:
    """With keys and values for each query head, and with all biases."""
    repeated = {}
    for name, tensor in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            by_head = tensor.view(config.kv_heads, config.head_dim, *tensor.shape[1:])
            tensor = by_head.repeat_interleave(config.n_heads // config.kv_heads, 0).flatten(0, 1)
        repeated[name] = tensor
    return {
        name.removesuffix("weight") + "bias": tensor.new_zeros(tensor.shape[0])
        for name, tensor in repeated.items()
        if name.startswith(("blocks.", "norm."))
    } | repeated


# --- the table

LLAMA_KEYS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "ffn": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "seq_len": "max_position_embeddings",
}
GPT2_KEYS = {
    "d_model": "n_embd",
    "d_ff": "n_inner",
    "n_layers": "n_layer",
    "n_heads": "n_head",
    "ffn": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "seq_len": "n_positions",
}
ATTENTION_BIAS = {"attention_bias": "attention_bias"}
MLP_BIAS = {"bias": "mlp_bias"}
LLAMA_NAMES = _renamed(
    *(("embed", "embed_tokens"), ("blocks", "layers"), ("attn", "self_attn"), ("ffn", "mlp")),
    *(("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")),
)
APERTUS_NAMES = _renamed(
    *(("embed", "embed_tokens"), ("blocks", "layers"), ("attn", "self_attn"), ("ffn", "mlp")),
    *(("attn_norm", "attention_layernorm"), ("ffn_norm", "feedforward_layernorm")),
)
GATED, UNGATED = ("swiglu",), ("relu", "gelu", "gelu_tanh", "relu2")
ROPE: Settings = {"position": ("rope",), "norm": ("rmsnorm",), "attention_bias": (False, True)}
LEARNED: Settings = {"position": ("learned",), "norm": ("layernorm",)}
DROPOUT = {"attention_dropout": 0.0}
DISTINGUISHING = ("position", "qk_norm", "ffn", "norm", "bias")
ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM",
        "llama",
        LLAMA_KEYS | ATTENTION_BIAS | MLP_BIAS,
        ROPE | {"qk_norm": (False,), "ffn": GATED},
        LLAMA_NAMES,
        DROPOUT,
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        LLAMA_KEYS | ATTENTION_BIAS,
        ROPE | {"qk_norm": (True,), "ffn": GATED, "bias": (False,)},
        LLAMA_NAMES,
        DROPOUT | {"use_sliding_window": False},
    ),
    Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        LLAMA_KEYS,
        ROPE | {"qk_norm": (False,), "ffn": GATED, "bias": (False,), "attention_bias": ("qkv",)},
        LLAMA_NAMES,
        DROPOUT | {"use_sliding_window": False},
    ),
    Architecture(
        "ArceeForCausalLM",
        "arcee",
        LLAMA_KEYS | ATTENTION_BIAS | MLP_BIAS,
        ROPE | {"qk_norm": (False,), "ffn": UNGATED},
        LLAMA_NAMES,
        DROPOUT,
    ),
    Architecture(
        "ApertusForCausalLM",
        "apertus",
        LLAMA_KEYS | ATTENTION_BIAS,
        ROPE | {"qk_norm": (True,), "ffn": UNGATED, "bias": (False,)},
        APERTUS_NAMES,
        DROPOUT,
    ),
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        GPT2_KEYS,
        LEARNED | {"qk_norm": (False,), "ffn": UNGATED},
        _gpt2_names,
        {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        _as_gpt2,
    ),
)
