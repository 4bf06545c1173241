"""Which architecture of transformers computes the same as a model of this project, and under which names.

The weights are the same tensors under other names, so the logits are the same too. Each architecture is described once;
the export reads the description from left to right, the import from right to left.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from lm.config import ModelConfig, UserError
from lm.exchange.tensor_names import Stacked, Weights, as_gpt2, gpt2_names, renamed

Settings = dict[str, Any]


class Architecture(NamedTuple):
    name: str  # the class in transformers
    model_type: str
    keys: dict[str, str]  # our setting -> theirs; the context length is ours as seq_len
    accepts: dict[str, tuple[object, ...]]  # our setting -> its possible values; other settings may have any value
    names: Callable[[Iterable[str], ModelConfig], dict[str, Stacked]]  # of the tensors: theirs -> ours
    defaults: Settings  # what transformers takes where config.json is silent
    constants: Settings  # written by the export
    prepare: Callable[[Weights, ModelConfig], Weights] = lambda weights, config: weights  # before the export

    def unsupported(self, config: ModelConfig) -> list[str]:
        """The settings whose values the architecture does not have."""
        found = [key for key, values in self.accepts.items() if resolved(config)[key] not in values]
        square = config.n_heads * config.head_dim == config.d_model
        return found if square or "d_head" in self.keys else [*found, "d_head"]

    def settings(self, config: ModelConfig, seq_len: int) -> Settings:
        """What config.json says of a model."""
        ours = resolved(config) | {"seq_len": seq_len, "ffn": ACTIVATIONS[config.ffn]}
        found = {"model_type": self.model_type, **{theirs: ours[key] for key, theirs in self.keys.items()}}
        return found | self.constants | (rope_settings(config) if config.position == "rope" else {})

    def weights(self, weights: Weights, config: ModelConfig) -> Weights:
        """Our weights, without the head's, under their names."""
        weights = self.prepare(weights, config)
        return {
            theirs: joined.T if one.transposed else joined
            for theirs, one in self.names(weights, config).items()
            for joined in [weights[one.names[0]] if len(one.names) == 1 else torch.cat([weights[n] for n in one.names])]
        }


ACTIVATIONS = {"swiglu": "silu", "relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def resolved(config: ModelConfig) -> Settings:
    """Every setting, with a value in the place of each null that stands for another setting's."""
    return asdict(config) | {
        "n_kv_heads": config.kv_heads,
        "d_head": config.head_dim,
        "attention_bias": config.attn_bias,
    }


def rope_settings(config: ModelConfig) -> Settings:
    scaled = dict(zip(SCALING, config.rope_scaling or (), strict=bool(config.rope_scaling)))
    scaling = {"rope_type": "llama3", **scaled} if scaled else {"rope_type": "default"}
    return {
        "rope_parameters": {**scaling, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,  # this key and the next are for transformers 4
        "rope_scaling": scaling if scaled else None,
    }


LLAMA_KEYS = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "ffn": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
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
LLAMA_PARTS = (("embed", "embed_tokens"), ("blocks", "layers"), ("attn", "self_attn"), ("ffn", "mlp"))
PRE_NORMS = (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"))
APERTUS_NORMS = (("attn_norm", "attention_layernorm"), ("ffn_norm", "feedforward_layernorm"))
UNGATED = ("relu", "gelu", "gelu_tanh", "relu2")
RMSNORM_ROPE: dict[str, tuple[object, ...]] = {"position": ("rope",), "norm": ("rmsnorm",)}
LAYERNORM_LEARNED: dict[str, tuple[object, ...]] = {"position": ("learned",), "norm": ("layernorm",)}
LLAMA_DEFAULTS: Settings = {"rms_norm_eps": 1e-6, "attention_bias": False, "hidden_act": "silu"}
APERTUS_ROPE: Settings = {
    "rope_theta": 12e6,
    "rope_scaling": {"rope_type": "llama3", **dict(zip(SCALING, (8.0, 1.0, 4.0, 8192), strict=True))},
}
ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM",
        "llama",
        LLAMA_KEYS | {"bias": "mlp_bias"},
        RMSNORM_ROPE | {"qk_norm": (False,), "ffn": ("swiglu",)},
        renamed(*LLAMA_PARTS, *PRE_NORMS),
        LLAMA_DEFAULTS | {"mlp_bias": False},
        {"attention_dropout": 0.0},
    ),
    Architecture(
        "Qwen3ForCausalLM",
        "qwen3",
        LLAMA_KEYS,
        RMSNORM_ROPE | {"qk_norm": (True,), "ffn": ("swiglu",), "bias": (False,)},
        renamed(*LLAMA_PARTS, *PRE_NORMS),
        LLAMA_DEFAULTS | {"head_dim": 128},
        {"attention_dropout": 0.0, "use_sliding_window": False},
    ),
    Architecture(
        "ArceeForCausalLM",
        "arcee",
        LLAMA_KEYS | {"bias": "mlp_bias"},
        RMSNORM_ROPE | {"qk_norm": (False,), "ffn": UNGATED},
        renamed(*LLAMA_PARTS, *PRE_NORMS),
        LLAMA_DEFAULTS | {"mlp_bias": False, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        {"attention_dropout": 0.0},
    ),
    Architecture(
        "ApertusForCausalLM",
        "apertus",
        LLAMA_KEYS,
        RMSNORM_ROPE | {"qk_norm": (True,), "ffn": UNGATED, "bias": (False,)},
        renamed(*LLAMA_PARTS, *APERTUS_NORMS),
        LLAMA_DEFAULTS | {"rms_norm_eps": 1e-5, "hidden_act": "xielu"} | APERTUS_ROPE,
        {"attention_dropout": 0.0},
    ),
    Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        GPT2_KEYS,
        LAYERNORM_LEARNED | {"qk_norm": (False,), "ffn": UNGATED},
        gpt2_names,
        {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024, "n_inner": None},
        {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        as_gpt2,
    ),
)
DISTINGUISHING = ("position", "qk_norm", "ffn", "norm", "bias")


def architecture_of(
    config: ModelConfig, among: Sequence[Architecture] = ARCHITECTURES, where: str = ""
) -> Architecture:
    """The first architecture that computes the same. Raises UserError naming the setting that none has."""
    for one in among:
        if not one.unsupported(config):
            return one
    nearest = min(among, key=lambda one: [key in one.unsupported(config) for key in DISTINGUISHING])
    key = nearest.unsupported(config)[0]
    setting = f"{where}model.{key}={str(getattr(config, key)).lower()}"
    raise UserError(f"{setting}: cannot be exported, {nearest.name} does not support it; see docs/model.md")
