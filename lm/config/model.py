"""The model: its transformer blocks, its LM head, and what its folder says of it."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lm.config.checks import UserError, require, require_choice, require_min

LINEARS = ("linear", "lora")
NORMS = ("rmsnorm", "layernorm", "none")
NORM_ORDERS = ("pre", "post")
FFNS = ("relu", "gelu", "gelu_tanh", "relu2", "silu", "swiglu")
POSITIONS = ("rope", "learned", "none")
CLASSES = {"model.linear": LINEARS, "model.norm": NORMS, "model.ffn": FFNS, "model.position": POSITIONS}
MAX_LAYERS = 10_000  # many more would take minutes to build
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The transformer without its head. Widths and counts are final values: nothing is rounded later.

    The defaults are a plain transformer. configs/model/small.yaml, the default model of train.py, adds qk_norm=true,
    rope_theta=100 and previous_token_init=2. `norm`, `ffn`, `position` and `linear` may also be the dotted path of a
    class, see lm/model/user_class.py.

    >>> ModelConfig(d_model=100, n_heads=3)
    Traceback (most recent call last):
    lm.config.checks.UserError: model.d_model=100 is not divisible by model.n_heads=3
    """

    n_layers: int = 4  # transformer blocks
    d_model: int = 128  # width of the residual stream and of each embedding
    n_heads: int = 2  # of attention, in each block
    n_kv_heads: int | None = None  # below n_heads: grouped-query attention; 1: multi-query; null: n_heads
    d_head: int | None = None  # width of a head; null: d_model / n_heads
    d_ff: int = 320  # width of the hidden layer of the FFN
    norm: str = "rmsnorm"  # or layernorm, none, or the dotted path of a class
    norm_order: str = "pre"  # norms before attention and FFN, or post: after each is added to its input
    norm_eps: float = 1e-5  # added to the variance or mean square, so that nothing is divided by zero
    ffn: str = "swiglu"  # or relu, gelu, gelu_tanh, relu2, silu, or the dotted path of a class
    position: str = "rope"  # or learned, none, or the dotted path of a class
    qk_norm: bool = False  # normalise the queries and keys of each head by `norm`
    bias: bool = False  # in every projection and LayerNorm; the LM head never has one
    attention_bias: bool | str | None = None  # in q, k, v and o; qkv: in q, k and v alone; null: `bias`
    dropout: float = 0.0  # set to zero in training: of embeddings, attention weights, outputs of attention and FFN
    linear: str = "linear"  # lora, or the dotted path of a class called like torch.nn.Linear
    lora_rank: int | None = None  # of the adapters of linear=lora; null: 8
    lora_alpha: float | None = None  # adapters are multiplied by alpha / rank; null: 16
    lora_targets: list[str] | None = None  # the projections that have an adapter; null: all
    rope_theta: float = 10000.0  # the base of RoPE's wavelengths; lower values suit short contexts
    rope_scaling: list[float] | None = None  # Llama 3's four numbers, see RoPE in lm/model/transformer.py; null: none
    previous_token_init: int = 0  # first layers whose heads initially attend to the token 1, 2, ... positions back
    vocab_rows: int | None = None  # rows of the embedding if more than the tokenizer has tokens; null: as many
    residual_scale: float | None = None  # initial o_proj and down_proj are multiplied by it; null: 1/sqrt(2 n_layers)

    def __post_init__(self) -> None:
        for key, path in foreign_classes(self).items():
            if "." not in path or not all(part.isidentifier() for part in path.split(".")):
                choices = ", ".join(CLASSES[key])
                raise UserError(f"{key}={path}: choose one of {choices}, or the dotted path of a class")
        require_choice("model.norm_order", self.norm_order, NORM_ORDERS)
        heads = ("n_heads", "n_kv_heads", "d_head")
        require_min(1, "model.", self, "n_layers", "d_model", *heads, "d_ff", "vocab_rows", "lora_rank")
        require(self.n_layers <= MAX_LAYERS, f"model.n_layers={self.n_layers}", f"at most {MAX_LAYERS}")
        require_min(0, "model.", self, "dropout", "residual_scale", "previous_token_init")
        without_rope = {"previous_token_init": "0", "rope_scaling": "null"} if self.position != "rope" else {}
        without_norm = {"previous_token_init": "0", "qk_norm": "false"} if self.norm == "none" else {}
        for choice, defaults in ((f"position={self.position}", without_rope), ("norm=none", without_norm)):
            for key, default in defaults.items():
                require(not getattr(self, key), f"model.{key}={getattr(self, key)}", f"{default} with model.{choice}")
        if self.d_head is None and self.d_model % self.n_heads:
            raise UserError(f"model.d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}")
        if self.position == "rope" and self.head_dim % 2:
            key = "d_model/n_heads" if self.d_head is None else "model.d_head"
            raise UserError(f"model.position=rope needs an even head width, not {key}={self.head_dim}")
        if self.n_heads % self.kv_heads:
            raise UserError(f"model.n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.kv_heads}")
        setting = f"model.attention_bias={self.attention_bias}"
        require(self.attention_bias in (None, False, True, "qkv"), setting, "true, false, qkv or null")
        require(self.dropout < 1, f"model.dropout={self.dropout}", "less than 1")
        for key, value in {"rope_theta": self.rope_theta, "norm_eps": self.norm_eps}.items():
            require(0 < value < math.inf, f"model.{key}={value}", "a number above 0")
        if (numbers := self.rope_scaling) is not None:
            expected = "[factor, low_freq_factor, high_freq_factor, original_context], such as [32,1,4,8192]"
            is_scaling = len(numbers) == 4 and min(numbers) > 0 and numbers[1] < numbers[2]
            require(is_scaling, f"model.rope_scaling={numbers}", expected)
        for key in ("lora_rank", "lora_alpha", "lora_targets"):
            if self.linear != "lora" and (given := getattr(self, key)) is not None:
                raise UserError(f"model.{key}={given}: is for model.linear=lora, not {self.linear}; leave it null")
        require(0 < self.alpha < math.inf, f"model.lora_alpha={self.alpha}", "a number above 0")
        require(self.lora_targets != [], "model.lora_targets=[]", "one projection or more; null means all")
        for name in self.adapted:
            require_choice("model.lora_targets", name, self.projections)

    @property
    def projections(self) -> tuple[str, ...]:
        return tuple(name for name in PROJECTIONS if name != "gate_proj" or self.ffn == "swiglu")

    @property
    def rank(self) -> int:
        return self.lora_rank or 8

    @property
    def alpha(self) -> float:
        return 16.0 if self.lora_alpha is None else self.lora_alpha

    @property
    def adapted(self) -> tuple[str, ...]:
        """The projections that have an adapter."""
        if self.linear != "lora":
            return ()
        return self.projections if self.lora_targets is None else tuple(self.lora_targets)

    @property
    def head_dim(self) -> int:
        return self.d_head or self.d_model // self.n_heads

    @property
    def attn_bias(self) -> bool | str:
        return self.bias if self.attention_bias is None else self.attention_bias

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads


def foreign_classes(config: ModelConfig) -> dict[str, str]:
    """The settings that name a class of the user's own, such as model.ffn, with its dotted path."""
    named = {key: getattr(config, key.removeprefix("model.")) for key in CLASSES}
    return {key: path for key, path in named.items() if path not in CLASSES[key]}


def refuse_foreign_classes(model: Mapping[str, Any], typed: Collection[str]) -> None:
    """Refuse to import a class that a folder names, which may be a stranger's, unless the user has named it too."""
    for key in CLASSES.keys() - {*typed}:
        if (cls := model[key.removeprefix("model.")]) not in CLASSES[key]:
            raise UserError(f"its class {cls} would be imported; add {key}={cls} if you trust it")


# Settings that only some kinds of head have: each kind needs its own and accepts no others.
OWN_SETTINGS: dict[str, tuple[str, ...]] = {
    "tied": (),
    "untied": ("head_std", "head_lr_multiplier"),
    "tied_projected": ("head_lr_multiplier",),
    "untied_from_embedding": ("head_lr_multiplier",),
    "untied_midtraining": ("head_lr_multiplier", "untie_at"),
}
HEADS = tuple(OWN_SETTINGS)


@dataclass(slots=True, kw_only=True)
class HeadConfig:
    """The tying variant: which LM head, with the initialisation and learning rates that suit it.

    `name` is the file name of the config, `kind` the key of the class in HEADS of lm/model/head.py. The learning-rate
    multipliers scale optim.adam_lr, or optim.lr where that is null. The defaults are those of configs/head/tied.yaml,
    except for its tuned embedding_lr_multiplier.

    >>> HeadConfig(name="untied", kind="untied", embedding_std=1.0, head_std=0.01, head_lr_multiplier=1.0).kind
    'untied'
    """

    name: str = "tied"  # by which folders and rows of results call it
    kind: str = "tied"  # how the LM head and the embedding share weights; see configs/head/
    embedding_std: float | None = None  # initial standard deviation of the embedding; null: 1/sqrt(d_model)
    embedding_multiplier: float | None = 1.0  # of the input embeddings, not of the output ones; null: sqrt(d_model)
    embedding_lr_multiplier: float = 1.0  # learning rate of the embedding, as a multiple
    head_std: float | None = None  # initial standard deviation of the head's own matrix
    head_lr_multiplier: float | None = None  # learning rate of the head's own matrix, as a multiple
    untie_at: float | None = None  # the fraction of training at which the head is untied

    def __post_init__(self) -> None:
        require_choice("head.kind", self.kind, HEADS)
        require_min(0, "head.", self, "embedding_std", "embedding_multiplier", "embedding_lr_multiplier")
        require_min(0, "head.", self, "head_std", "head_lr_multiplier", "untie_at")
        for key in ("head_lr_multiplier", "head_std", "untie_at"):
            needed, given = key in OWN_SETTINGS[self.kind], getattr(self, key) is not None
            require(given or not needed, f"head.{key}", f"a number with head.kind={self.kind}; see configs/head/")
            require(needed or not given, f"head.{key}={getattr(self, key)}", f"null with head.kind={self.kind}")
        require((self.untie_at or 0) <= 1, f"head.untie_at={self.untie_at}", "0 to 1, a fraction of training")


WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"  # beside the config.json of a model


@dataclass(slots=True, kw_only=True)
class ModelSettings:
    """The content of a model's config.json: all that builds a model, and the hashes of the files beside it."""

    vocab_size: int
    seq_len: int  # the longest context
    document_separator: int | None = None
    model: ModelConfig
    head: HeadConfig
    sha256: dict[str, str]  # of WEIGHTS and TOKENIZER; empty for a folder of transformers, which says none
    architecture: str | None = None  # in transformers, of one of its folders

    def __post_init__(self) -> None:
        require_min(1, "", self, "vocab_size", "seq_len")
        require_min(0, "", self, "document_separator")
