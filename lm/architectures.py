"""Which architecture of transformers computes what a model of ours computes, and under which names.

The weights are the same tensors under other names, so the logits are the same too.
"""

from collections.abc import Callable, Iterator
from typing import Any

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
    """The architecture, its settings, and the body's weights under its names."""
    config = net.config
    if not all(isinstance(module, Linear) for name, module in net.named_modules() if name.endswith("_proj")):
        raise BadInput(f"model.linear={config.linear}: only models of the project's own linear class are exported")
    for fits, name, settings, rename in ARCHITECTURES:
        if not list(fits(config)):
            return name, settings(net), rename(net)

    def distance(architecture: Architecture) -> list[bool]:
        wrong = {said.partition("=")[0] for said in architecture[0](config)}
        return [f"model.{key}" in wrong for key in ("position", "qk_norm", "ffn", "norm", "bias")]

    fits, name, _, _ = min(ARCHITECTURES, key=distance)
    raise BadInput(f"{next(fits(config))}: {name}, the nearest, has no such switch; the README says what is exported")


def misfits_llama(config: ModelConfig) -> Iterator[str]:
    yield from misfits(config, norm="rmsnorm", position="rope", ffn="swiglu", qk_norm=False)


def misfits_qwen3(config: ModelConfig) -> Iterator[str]:
    yield from misfits(config, norm="rmsnorm", position="rope", ffn="swiglu", qk_norm=True, bias=False)


def misfits_arcee(config: ModelConfig) -> Iterator[str]:
    yield from misfits(config, norm="rmsnorm", position="rope", qk_norm=False)
    if config.ffn == "swiglu":
        yield "model.ffn=swiglu"


def misfits_apertus(config: ModelConfig) -> Iterator[str]:
    yield from misfits(config, norm="rmsnorm", position="rope", qk_norm=True, bias=False)
    if config.ffn == "swiglu":
        yield "model.ffn=swiglu"


def misfits_gpt2(config: ModelConfig) -> Iterator[str]:
    yield from misfits(config, norm="layernorm", position="learned", qk_norm=False)
    if config.ffn == "swiglu":
        yield "model.ffn=swiglu"


def misfits(config: ModelConfig, **wanted: object) -> Iterator[str]:
    for key, value in wanted.items():
        if getattr(config, key) != value:
            yield f"model.{key}={str(getattr(config, key)).lower()}"


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
        "hidden_act": "silu",
        "max_position_embeddings": net.seq_len,
        "rms_norm_eps": EPS,
        "rope_theta": config.rope_theta,  # for transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": 0.0,
    }


def qwen3_settings(net: Transformer) -> dict[str, Any]:
    return llama_settings(net) | {"model_type": "qwen3", "use_sliding_window": False}


def arcee_settings(net: Transformer) -> dict[str, Any]:
    return llama_settings(net) | {"model_type": "arcee", "hidden_act": net.config.ffn}


def apertus_settings(net: Transformer) -> dict[str, Any]:
    return llama_settings(net) | {"model_type": "apertus", "hidden_act": net.config.ffn}


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


def body_weights(net: Transformer) -> Weights:
    """All but the head, the table as it is looked up."""
    weights = {name: tensor for name, tensor in net.state_dict().items() if not name.startswith("head.")}
    return weights | {"embed.weight": net.embed.matrix()}


def llama_weights(net: Transformer) -> Weights:
    weights = {}
    for name, tensor in body_weights(net).items():
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
    """GPT-2 keeps matrices as (in, out), q, k and v in one, a key for each query head, and biases everywhere."""
    config, ours = net.config, body_weights(net)

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


Misfits = Callable[[ModelConfig], Iterator[str]]
Settings = Callable[[Transformer], dict[str, Any]]
Architecture = tuple[Misfits, str, Settings, Callable[[Transformer], Weights]]
ARCHITECTURES: tuple[Architecture, ...] = (
    (misfits_llama, "LlamaForCausalLM", llama_settings, llama_weights),
    (misfits_qwen3, "Qwen3ForCausalLM", qwen3_settings, llama_weights),
    (misfits_arcee, "ArceeForCausalLM", arcee_settings, llama_weights),
    (misfits_apertus, "ApertusForCausalLM", apertus_settings, apertus_weights),
    (misfits_gpt2, "GPT2LMHeadModel", gpt2_settings, gpt2_weights),
)
