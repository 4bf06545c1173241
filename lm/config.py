"""Schemas of a run: typed dataclasses, the names of choices, and what a mistake in them is called.

Hydra composes the YAML files of `configs/` into these classes, so a misspelt key or a wrong type is an
error before anything is built. This file imports neither torch nor hydra.
"""

import math
from dataclasses import dataclass, field
from typing import Any

NORMS = ("rmsnorm", "layernorm")
FFNS = ("relu", "gelu", "relu2", "swiglu")
POSITIONS = ("rope", "learned", "none")
HEADS = ("tied", "untied", "tied_projected", "untied_copied", "split")
SOURCES = ("stdlib", "text", "json", "csv", "parquet", "hub")
TOKENIZERS = ("bpe", "char", "byte", "file")
OPTIMIZERS = ("adamw", "muon")
LOSSES = ("auto", "plain", "chunked")
DECAYS = ("cosine", "linear", "constant")


class BadInput(ValueError):
    """A mistake that the user can mend: one line that names the key or file, what was found, what is expected."""


class Diverged(BadInput):
    """Training left the numbers: an outcome of these settings, the same whenever it is tried."""


def choose(key: str, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        raise BadInput(f"{key}={name}: choose one of {', '.join(names)}")


def at_least(minimum: float, prefix: str, config: Any, *keys: str) -> None:
    for key in keys:
        value = getattr(config, key)
        if value is not None and not minimum <= value < math.inf:  # refuses nan too
            raise BadInput(f"{prefix}{key}={value}: expected {minimum} or more")


def seedable(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise BadInput(f"seed={seed}: expected 0 to 2**63 - 1")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The body of the transformer. Widths and counts are final values: nothing is rounded or derived later.

    >>> ModelConfig(d_model=100, n_heads=3)
    Traceback (most recent call last):
    lm.config.BadInput: model.d_model=100 is not divisible by model.n_heads=3
    """

    n_layers: int = 4
    d_model: int = 128
    n_heads: int = 2
    n_kv_heads: int | None = None  # fewer than n_heads: grouped queries; 1: multi-query; null: n_heads
    d_ff: int = 320
    norm: str = "rmsnorm"
    ffn: str = "swiglu"
    position: str = "rope"
    qk_norm: bool = False  # normalise each head's queries and keys, with the kind of `norm`
    bias: bool = False  # in every projection and LayerNorm of the body; the logits head never has one
    dropout: float = 0.0
    linear: str = "linear"  # a name in LINEARS, or the dotted path of a class with nn.Linear's signature
    rope_theta: float = 10000.0
    lookback: int = 0  # layers, from the first, whose heads start by looking 1, 2, ... tokens back
    residual_init: float | None = None  # scale of o_proj and down_proj at the start; null: 1/sqrt(2 n_layers)

    def __post_init__(self) -> None:
        choose("model.norm", self.norm, NORMS)
        choose("model.ffn", self.ffn, FFNS)
        choose("model.position", self.position, POSITIONS)
        at_least(1, "model.", self, "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff")
        at_least(0, "model.", self, "dropout", "residual_init", "lookback")
        if self.lookback and self.position != "rope":
            raise BadInput(f"model.position={self.position}: only rope can look back; add model.lookback=0")
        if self.d_model % self.n_heads:
            raise BadInput(f"model.d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}")
        if self.n_heads % self.kv_heads:
            raise BadInput(f"model.n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.kv_heads}")
        if self.position == "rope" and self.head_dim % 2:
            raise BadInput(f"model.position=rope needs an even head width, not d_model/n_heads={self.head_dim}")
        if self.dropout >= 1:
            raise BadInput(f"model.dropout={self.dropout}: expected less than 1")
        if not self.rope_theta > 0:
            raise BadInput(f"model.rope_theta={self.rope_theta}: expected more than 0")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads


# Which settings of its own each kind of head needs; it takes no others.
OWN_SETTINGS: dict[str, tuple[str, ...]] = {
    "tied": (),
    "untied": ("head_std", "head_lr"),
    "tied_projected": ("head_lr",),
    "untied_copied": ("head_lr",),
    "split": ("head_lr", "split_at"),
}


@dataclass(slots=True, kw_only=True)
class HeadConfig:
    """How logits are made, with the init and learning rates that make this regime a good one.

    `name` is the config's file name, `kind` the class. Multipliers scale `optim.adam_lr`, or `optim.lr` without one.

    >>> HeadConfig(name="untied", kind="untied", table_std=1.0, head_std=0.01, head_lr=1.0).kind
    'untied'
    """

    name: str = "tied"
    kind: str = "tied"
    table_std: float | None = None  # standard deviation of the embedding table at the start; null: 1/sqrt(d_model)
    lookup_scale: float | None = 1.0  # multiplies what is looked up, not what scores; null: sqrt(d_model)
    table_lr: float = 1.0
    head_std: float | None = None  # of the head's own matrix, where it draws one
    head_lr: float | None = None  # of the head's own matrix, where it has one
    split_at: float | None = None  # the fraction of training after which a split head has its own matrix

    def __post_init__(self) -> None:
        choose("head.kind", self.kind, HEADS)
        at_least(0, "head.", self, "table_std", "lookup_scale", "table_lr", "head_std", "head_lr", "split_at")
        for key in ("head_lr", "head_std", "split_at"):
            needed, given = key in OWN_SETTINGS[self.kind], getattr(self, key) is not None
            if needed and not given:
                raise BadInput(f"head.{key}: head.kind={self.kind} needs one; see configs/head/")
            if given and not needed:
                raise BadInput(f"head.{key}={getattr(self, key)}: head.kind={self.kind} has none; leave it null")
        if (self.split_at or 0) > 1:
            raise BadInput(f"head.split_at={self.split_at}: expected 0 to 1, a fraction of training")


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """Where text comes from and how it is cut."""

    source: str = "stdlib"
    path: str | None = None  # a file, folder, glob, http(s) URL, or the Hub's owner/name
    sha256: str | None = None  # text: of the one file that it must be; null: any
    column: str = "text"  # json, csv, parquet, hub: the column that holds the text
    split: str = "train"  # hub: which split to read
    seq_len: int = 128  # tokens a training window holds, and the longest context of the model
    batch_size: int = 8  # sequences per optimizer step on one device
    val_fraction: float = 0.1
    overfit_batches: int = 0  # above 0: train on these first batches again and again
    cache_dir: str = ".cache"

    def __post_init__(self) -> None:
        choose("data.source", self.source, SOURCES)
        at_least(1, "data.", self, "seq_len", "batch_size")
        at_least(0, "data.", self, "overfit_batches")
        if not 0 < self.val_fraction < 1:
            raise BadInput(f"data.val_fraction={self.val_fraction}: expected between 0 and 1")
        if self.sha256 is not None and self.source != "text":
            raise BadInput(f"data.sha256={self.sha256}: is for data=text; data.source={self.source} has none")
        if self.source != "stdlib" and not self.path:
            raise BadInput(f"data.path: data.source={self.source} needs one (data.path=FILE)")
        if self.source == "stdlib" and self.path is not None:
            raise BadInput(f"data.path={self.path}: data=stdlib reads no file; write data=text data.path=FILE")


@dataclass(slots=True, kw_only=True)
class TokenizerConfig:
    kind: str = "bpe"
    vocab_size: int | None = 2048  # bpe: exact, the end-of-text token included
    path: str | None = None  # file: a tokenizer.json

    def __post_init__(self) -> None:
        choose("tokenizer.kind", self.kind, TOKENIZERS)
        if self.kind == "bpe" and (self.vocab_size or 0) < 257:
            raise BadInput(f"tokenizer.vocab_size={self.vocab_size}: bpe needs 257 or more (256 bytes, end of text)")
        if self.kind != "bpe" and self.vocab_size is not None:
            raise BadInput(f"tokenizer.vocab_size={self.vocab_size}: tokenizer.kind={self.kind} decides its own size")
        if (self.kind == "file") != (self.path is not None):
            raise BadInput("tokenizer.path: give it with tokenizer=file, and only there")


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """The optimizer and its schedule: a linear warm-up times a decay, both pure functions of the step."""

    name: str = "adamw"
    lr: float = 3e-3  # of the body's matrices, and of all else where adam_lr is null
    adam_lr: float | None = None  # muon: of table, head and vectors; the head's config scales it for the first two
    momentum: float | None = None  # muon
    rounds: int | None = None  # muon: of the iteration that makes a step orthogonal
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices in the body; the table, the head, norms and biases never decay
    warmup_steps: int = 50
    decay: str = "linear"
    decay_fraction: float = 1.0  # the last part of the run, over which the rate decays
    final_lr: float = 0.0  # of the peak: what the decay runs towards

    def __post_init__(self) -> None:
        choose("optim.name", self.name, OPTIMIZERS)
        choose("optim.decay", self.decay, DECAYS)
        at_least(0, "optim.", self, "lr", "eps", "weight_decay", "warmup_steps", "decay_fraction", "final_lr")
        at_least(0, "optim.", self, "adam_lr")
        if self.rounds is not None and not 1 <= self.rounds <= 7:
            raise BadInput(f"optim.rounds={self.rounds}: expected 1 to 7")
        for key in ("adam_lr", "momentum", "rounds"):
            if (self.name == "muon") != (getattr(self, key) is not None):
                raise BadInput(f"optim.{key}={getattr(self, key)}: give it with optim=muon, and only there")
        if not 0 <= (self.momentum or 0) < 1:
            raise BadInput(f"optim.momentum={self.momentum}: expected from 0 to below 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise BadInput(f"optim.betas={self.betas}: expected two numbers from 0 to below 1")
        if self.decay_fraction > 1:
            raise BadInput(f"optim.decay_fraction={self.decay_fraction}: expected 0 to 1")


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    every: int = 100  # optimizer steps
    keep: int = 2
    resume: bool = True  # false: an unfinished run starts again from step 0

    def __post_init__(self) -> None:
        at_least(1, "checkpoint.", self, "every", "keep")


@dataclass(slots=True, kw_only=True)
class ValidationConfig:
    """Validation while training; the final one always covers the whole split."""

    every: int = 100  # optimizer steps; 0: only at the end
    batches: int | None = 16  # of data.batch_size sequences; null: all

    def __post_init__(self) -> None:
        at_least(0, "validation.", self, "every")
        at_least(1, "validation.", self, "batches")


@dataclass(slots=True, kw_only=True)
class DiagnosticsConfig:
    """What goes on at the table: gradients by side, row norms, loss by frequency; see lm/diagnostics.py."""

    every: int = 0  # optimizer steps; 0: never

    def __post_init__(self) -> None:
        at_least(0, "diagnostics.", self, "every")


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a training run, and where it goes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: dict[str, Any] = field(default_factory=dict)  # arguments of lightning.Trainer
    logger: dict[str, Any] = field(default_factory=dict)  # name -> _target_ of a Lightning logger
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    prompts: list[str] | None = None  # continued greedily at the end; null: three places of the validation text
    max_tokens: int | None = None  # the run's length in tokens; overrules trainer.max_steps
    seed: int = 0
    threads: int | None = None  # null: OMP_NUM_THREADS, else the cores
    loss: str = "auto"  # plain or chunked: one function; auto takes the one that is faster where it runs
    recompute: bool = False  # blocks keep nothing for the backward pass: less memory, a third more computing
    compile: bool = False
    run_dir: str | None = None  # null: runs/, under a name that ends in the hash of this configuration

    def __post_init__(self) -> None:
        choose("loss", self.loss, LOSSES)
        at_least(1, "", self, "max_tokens", "threads")
        seedable(self.seed)
        if self.run_dir == "":
            raise BadInput("run_dir: is empty; expected a directory, or null for a name of its own under runs/")


# Where a run's settings lie that do not change what is computed: left out of its hash, free to differ on resume.
RUNTIME = (
    *("run_dir", "logger", "checkpoint", "prompts", "recompute"),
    *("data.cache_dir", "trainer.enable_progress_bar"),
)

# Arguments of lightning.Trainer that are decided here: batches without end, our validation, checkpoints, logs, clip.
OURS = (
    *("max_epochs", "min_epochs", "min_steps", "max_time", "fast_dev_run", "overfit_batches", "barebones"),
    *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"),
    *("enable_checkpointing", "enable_model_summary", "use_distributed_sampler", "default_root_dir"),
    *("callbacks", "plugins", "logger", "gradient_clip_algorithm", "reload_dataloaders_every_n_epochs"),
)
DECIDED = "is decided by this project; see max_tokens, validation, checkpoint and logger"


@dataclass(slots=True, kw_only=True)
class GenerateConfig:
    run_dir: str
    prompt: str | None = None  # taken verbatim, whatever it contains
    prompt_file: str | None = None  # a file to read the prompt from; - is standard input
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: greedy
    seed: int = 0
    threads: int | None = None
    trust: bool = False  # import the linear class that the run names, if it is not ours

    def __post_init__(self) -> None:
        at_least(0, "", self, "max_new_tokens", "temperature")
        seedable(self.seed)
        at_least(1, "", self, "threads")


@dataclass(slots=True, kw_only=True)
class EvaluateConfig:
    run_dir: str
    data: DataConfig | None = None  # null: the validation split that the run was trained beside
    threads: int | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        at_least(1, "", self, "threads")


@dataclass(slots=True, kw_only=True)
class ExportConfig:
    run_dir: str
    output_dir: str
    trust: bool = False
