"""Which architecture of transformers computes the same as a model of this project, and under which names.

The weights are the same tensors under other names, so the logits are the same too. Each architecture is described once;
the export reads the description from left to right, the import from right to left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lm.config import ModelConfig
from lm.errors import UserError

Weights = dict[str, torch.Tensor]
Settings = dict[str, Any]
ACTIVATIONS = {
    "swiglu": "silu",
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
}
SYNONYMS = {  # other names in transformers, of the same functions
    "swish": "silu",
    "gelu_python": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_pytorch_tanh"),
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DISTINGUISHING = ("position", "qk_norm", "ffn", "norm", "bias")  # the order in which a message looks for the nearest


@dataclass(frozen=True, kw_only=True)
class Architecture:
    name: str  # the class in transformers
    model_type: str
    keys: dict[str, str]  # our setting -> theirs; the context length is ours as seq_len
    accepts: dict[str, tuple[object, ...]]  # our setting -> its possible values; other settings may have any value
    parts: dict[str, str]  # our name of a module or matrix -> theirs; others have the same name
    trunk: str = "model"  # their name of all but the head
    constants: Settings = field(default_factory=dict)  # of config.json, where the default is another
    is_gpt2: bool = False  # stores matrices as (in, out), keys and values for each query head, and all biases

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

    def names(self, own_names: Iterable[str]) -> dict[str, list[str]]:
        """Their name of each tensor, and ours; several of ours are joined along the first dimension, in this order."""
        names: dict[str, list[str]] = {}
        for name in own_names:
            parts = (self.parts.get(part, part) for part in name.split("."))
            names.setdefault(".".join([self.trunk, *parts]), []).append(name)
        return names

    def transposed(self, own_name: str) -> bool:
        return self.is_gpt2 and own_name.endswith("_proj.weight")

    def weights(self, weights: Weights, config: ModelConfig) -> Weights:
        """Our weights, without the head's, under their names."""
        weights, renamed = _as_gpt2(weights, config) if self.is_gpt2 else weights, Weights()
        for name, own_names in self.names(weights).items():
            tensors = [weights[own_name] for own_name in own_names]
            tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            renamed[name] = tensor.T if self.transposed(own_names[0]) else tensor
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


def _resolved(config: ModelConfig) -> Settings:
    """Every setting, with a value in the place of each null that stands for another setting's."""
    values = {"n_kv_heads": config.kv_heads, "d_head": config.head_dim, "attention_bias": config.attn_bias}
    return asdict(config) | values


def _rope_settings(config: ModelConfig) -> Settings:
    scaled = dict(zip(SCALING, config.rope_scaling or (), strict=bool(config.rope_scaling)))
    scaling = {"rope_type": "llama3", **scaled} if scaled else {"rope_type": "default"}
    return {
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # this key and the next are for transformers 4
        "rope_scaling": scaling if scaled else None,
    }


def _as_gpt2(weights: Weights, config: ModelConfig) -> Weights:
    """With keys and values for each query head, and with all biases."""
    complete = Weights()
    for name, tensor in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            by_head = tensor.view(config.kv_heads, config.head_dim, *tensor.shape[1:])
            tensor = by_head.repeat_interleave(config.n_heads // config.kv_heads, 0).flatten(0, 1)
        complete[name] = tensor
        if name.startswith(("blocks.", "norm.")) and name.endswith(".weight"):
            complete.setdefault(name.removesuffix("weight") + "bias", tensor.new_zeros(tensor.shape[0]))
    return complete


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
LLAMA_PARTS = {
    "embed": "embed_tokens",
    "blocks": "layers",
    "attn": "self_attn",
    "ffn": "mlp",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
GPT2_PARTS = {
    "embed": "wte",
    "position": "wpe",
    "blocks": "h",
    "ffn": "mlp",
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "norm": "ln_f",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "c_attn"),
    "up_proj": "c_fc",
    **dict.fromkeys(("o_proj", "down_proj"), "c_proj"),
}
GATED, UNGATED = ("swiglu",), ("relu", "gelu", "gelu_tanh", "relu2", "silu")
PRE_NORM: Settings = {"norm_order": ("pre",)}
ROPE: Settings = {"position": ("rope",), "norm": ("rmsnorm",), "attention_bias": (False, True)} | PRE_NORM
LEARNED: Settings = {"position": ("learned",), "norm": ("layernorm",)} | PRE_NORM
APERTUS_PARTS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
PLAIN, NORMED, NO_BIAS = {"qk_norm": (False,)}, {"qk_norm": (True,)}, {"bias": (False,)}


def _like_llama(model_type: str, keys: dict[str, str], accepts: Settings, **parts: str) -> Architecture:
    """What is a Llama but for further keys, for what it accepts, and for the names of some parts."""
    name = f"{model_type.capitalize()}ForCausalLM"
    keys, accepts, parts = LLAMA_KEYS | keys, ROPE | accepts, LLAMA_PARTS | parts
    return Architecture(name=name, model_type=model_type, keys=keys, accepts=accepts, parts=parts)


ARCHITECTURES = (
    _like_llama("llama", ATTENTION_BIAS | MLP_BIAS, PLAIN | {"ffn": GATED}),
    _like_llama("qwen3", ATTENTION_BIAS, NORMED | {"ffn": GATED} | NO_BIAS),
    _like_llama("qwen2", {}, PLAIN | {"ffn": GATED, "attention_bias": ("qkv",)} | NO_BIAS),
    _like_llama("arcee", ATTENTION_BIAS | MLP_BIAS, PLAIN | {"ffn": UNGATED}),
    _like_llama("apertus", ATTENTION_BIAS, NORMED | {"ffn": UNGATED} | NO_BIAS, **APERTUS_PARTS),
    Architecture(
        name="GPT2LMHeadModel",
        model_type="gpt2",
        keys=GPT2_KEYS,
        accepts=LEARNED | PLAIN | {"ffn": UNGATED},
        parts=GPT2_PARTS,
        trunk="transformer",
        constants={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        is_gpt2=True,
    ),
)
