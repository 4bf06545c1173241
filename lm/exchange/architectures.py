"""Which architecture of transformers computes the same as a model of this project, and under which names.

The weights are the same tensors under other names, so the logits are the same too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lm.config import BadInput, ModelConfig
from lm.model.linear import Linear
from lm.model.norm import EPS
from lm.model.transformer import Transformer

Weights = dict[str, Tensor]
LLAMA_NAMES = (
    ("embed.", "model.embed_tokens."),
    ("blocks.", "model.layers."),
    ("norm.", "model.norm."),
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
)


def translate(net: Transformer) -> tuple[str, dict[str, Any], Weights]:
    """The architecture, its settings, and all weights except the head's under its names. Raises BadInput."""
    config = net.config
    if not all(isinstance(module, Linear) for name, module in net.named_modules() if name.endswith("_proj")):
        raise BadInput(f"model.linear={config.linear}: only models with model.linear=linear are exported")
    for one in ARCHITECTURES:
        if not unsupported(config, one):
            return one.name, one.settings(net), one.weights(net)
    nearest = min(ARCHITECTURES, key=lambda one: [key in unsupported(config, one) for key in SETTINGS])
    key = unsupported(config, nearest)[0]
    setting = f"model.{key}={str(getattr(config, key)).lower()}"
    raise BadInput(f"{setting}: cannot be exported, {nearest.name} does not support it; see docs/model.md")


def unsupported(config: ModelConfig, architecture: "Architecture") -> list[str]:
    """The settings whose values an architecture does not have."""
    return [key for key, values in architecture.accepts.items() if getattr(config, key) not in values]


def llama_settings(net: Transformer) -> dict[str, Any]:
    config = net.config
    return {
        "model_type": "llama",
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu" if config.ffn == "swiglu" else config.ffn,
        "max_position_embeddings": net.seq_len,
        "rms_norm_eps": EPS,
        "rope_theta": config.rope_theta,  # for transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": 0.0,
    }


def like_llama(model_type: str, **more: object) -> "Settings":
    return lambda net: llama_settings(net) | {"model_type": model_type, **more}


def gpt2_settings(net: Transformer) -> dict[str, Any]:
    config = net.config
    return {
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.d_ff,
        "n_positions": net.seq_len,
        "activation_function": config.ffn,
        "layer_norm_epsilon": EPS,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def weights_without_head(net: Transformer) -> Weights:
    """All weights except the head's, with the embedding multiplied as in the model."""
    weights = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("head.")}
    return weights | {"embed.weight": net.embed.matrix()}


def llama_weights(net: Transformer) -> Weights:
    weights = {}
    for name, tensor in weights_without_head(net).items():
        name = f"^{name}"
        for ours, theirs in LLAMA_NAMES:
            name = name.replace(ours if ours.startswith(".") else f"^{ours}", theirs)
        weights[name] = tensor
    return weights


def apertus_weights(net: Transformer) -> Weights:
    names = (("input_layernorm", "attention_layernorm"), ("post_attention_layernorm", "feedforward_layernorm"))
    weights = llama_weights(net)
    for llama, apertus in names:
        weights = {name.replace(llama, apertus): tensor for name, tensor in weights.items()}
    return weights


def gpt2_weights(net: Transformer) -> Weights:
    """GPT-2 stores matrices as (in, out), q, k and v together, keys and values for each query head, all biases."""
    config, ours = net.config, weights_without_head(net)

    def bias(name: str, width: int) -> Tensor:
        return ours.get(f"{name}.bias", torch.zeros(width))

    def every_head(tensor: Tensor) -> Tensor:
        """(kv_heads * K, ...) to (n_heads * K, ...)."""
        by_head = tensor.view(config.kv_heads, config.head_dim, *tensor.shape[1:])
        return by_head.repeat_interleave(config.n_heads // config.kv_heads, 0).flatten(0, 1)

    weights = {"transformer.wte.weight": ours["embed.weight"], "transformer.wpe.weight": ours["position.weight"]}
    norms = [("norm", "transformer.ln_f")]
    for i in range(config.n_layers):
        here, there = f"blocks.{i}", f"transformer.h.{i}"
        norms += [(f"{here}.attn_norm", f"{there}.ln_1"), (f"{here}.ffn_norm", f"{there}.ln_2")]
        names = [f"{here}.attn.{one}_proj" for one in "qkv"]
        kv_width = config.kv_heads * config.head_dim
        parts = [(ours[f"{one}.weight"], bias(one, config.d_model if one == names[0] else kv_width)) for one in names]
        parts[1:] = [(every_head(weight), every_head(offset)) for weight, offset in parts[1:]]
        weights[f"{there}.attn.c_attn.weight"] = torch.cat([weight for weight, _ in parts]).T
        weights[f"{there}.attn.c_attn.bias"] = torch.cat([offset for _, offset in parts])
        for name, theirs in (
            ("attn.o_proj", "attn.c_proj"),
            ("ffn.up_proj", "mlp.c_fc"),
            ("ffn.down_proj", "mlp.c_proj"),
        ):
            matrix = ours[f"{here}.{name}.weight"]
            weights[f"{there}.{theirs}.weight"] = matrix.T
            weights[f"{there}.{theirs}.bias"] = bias(f"{here}.{name}", matrix.shape[0])
    for name, theirs in norms:
        weights[f"{theirs}.weight"] = ours[f"{name}.weight"]
        weights[f"{theirs}.bias"] = bias(name, config.d_model)
    return weights


Settings = Callable[[Transformer], dict[str, Any]]
Accepts = dict[str, tuple[object, ...]]
SETTINGS = ("position", "qk_norm", "ffn", "norm", "bias")  # those that distinguish architectures come first


class Architecture(NamedTuple):
    name: str
    accepts: Accepts  # setting -> its possible values; other settings may have any value
    settings: Settings
    weights: Callable[[Transformer], Weights]


RMSNORM_ROPE: Accepts = {"norm": ("rmsnorm",), "position": ("rope",)}
SWIGLU: Accepts = {"ffn": ("swiglu",)}
UNGATED: Accepts = {"ffn": ("relu", "gelu", "relu2")}
NO_QK_NORM: Accepts = {"qk_norm": (False,)}
QK_NORM: Accepts = {"qk_norm": (True,), "bias": (False,)}
LAYERNORM_LEARNED: Accepts = {"norm": ("layernorm",), "position": ("learned",)}
ARCHITECTURES = (
    Architecture("LlamaForCausalLM", RMSNORM_ROPE | SWIGLU | NO_QK_NORM, llama_settings, llama_weights),
    Architecture(
        "Qwen3ForCausalLM",
        RMSNORM_ROPE | SWIGLU | QK_NORM,
        like_llama("qwen3", use_sliding_window=False),
        llama_weights,
    ),
    Architecture("ArceeForCausalLM", RMSNORM_ROPE | UNGATED | NO_QK_NORM, like_llama("arcee"), llama_weights),
    Architecture("ApertusForCausalLM", RMSNORM_ROPE | UNGATED | QK_NORM, like_llama("apertus"), apertus_weights),
    Architecture("GPT2LMHeadModel", LAYERNORM_LEARNED | NO_QK_NORM | UNGATED, gpt2_settings, gpt2_weights),
)
