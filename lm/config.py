"""The settings of a run. The comment behind a field is the help of the setting.

A field made by `unhashed` is not hashed as it stands: where the run lies, what is logged, how the text is read (the
hashes of the text and of the tokenizer stand for that). Some of these settings may decide a number, and are treated by
name: `requested_settings` has max_tokens as steps, `deciding_settings` adds validations and activation checkpointing
where they count, `differing_keys` compares threads on a CPU. All other settings decide the run: `config_hash` hashes
them and `differing_keys` compares them.

This module imports no torch, so that a wrong setting is refused within a second.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.errors import (
    UserError,
    check_kind,
    check_settings,
    check_unused,
    expand_paths,
    first_line,
    require,
    require_choice,
)


def unhashed(default: Any = MISSING, **options: Any) -> Any:
    """Return a dataclass field for a setting that is not hashed as it stands; see the first lines of this file."""
    return field(default=default, metadata={"hashed": False}, **options)


# --- the model

# Names alone, because this module imports no torch. The table of the same name (of FFNS: ACTIVATIONS, of NORM_ORDERS:
# BLOCKS) has the code of each name: in model/transformer.py, model/head.py, training/loss.py. LINEARS has no table, but
# `projection` in model/linear.py.
LINEARS = ("linear", "lora")
NORMS = ("rmsnorm", "layernorm", "none")
NORM_ORDERS = ("pre", "post")
FFNS = ("relu", "gelu", "gelu_tanh", "relu2", "silu", "swiglu")
GATED = ("swiglu",)  # a gated FFN has three matrices, so d_ff is usually 2/3 as large
POSITIONS = ("rope", "learned", "none")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Settings that may also be the dotted path of a class of the user, with the built-in names.
CLASSES = {
    "model.linear": LINEARS,
    "model.norm": NORMS,
    "model.ffn": FFNS,
    "model.position": POSITIONS,
}


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The transformer without its head. Widths and counts are final: nothing is rounded later.

    The defaults are a plain transformer; configs/model/small.yaml is the default of train.py.

    >>> ModelConfig(d_model=100, n_heads=3)
    Traceback (most recent call last):
    lm.errors.UserError: model.d_model=100 is not divisible by model.n_heads=3
    """

    n_layers: int = 4  # number of transformer blocks
    d_model: int = 128  # width of the residual stream and of each embedding
    n_heads: int = 2  # number of attention heads in each block
    n_kv_heads: int | None = None  # number of key and value heads; 1: multi-query; null: n_heads
    d_head: int | None = None  # width of a head; null: d_model / n_heads
    d_ff: int = 320  # width of the hidden layer of the FFN
    norm: str = "rmsnorm"  # rmsnorm, layernorm, none, or the dotted path of a class
    norm_order: str = "pre"  # pre: norms before attention and FFN; post: after each is added
    norm_eps: float = 1e-5  # number added to the variance or mean square of a norm
    ffn: str = "swiglu"  # swiglu, relu, gelu, gelu_tanh, relu2, silu, or the path of a class
    position: str = "rope"  # rope, learned, none, or the dotted path of a class
    qk_norm: bool = False  # whether queries and keys of each head are normalised by `norm`
    bias: bool = False  # whether projections and LayerNorms have a bias; the LM head never has one
    attention_bias: bool | str | None = None  # whether q, k, v, o have a bias; qkv: all but o; null: `bias`
    dropout: float = 0.0  # dropout rate of embeddings, attention weights, and both branches
    linear: str = "linear"  # linear, lora, or the dotted path of a class like torch.nn.Linear
    lora_rank: int | None = None  # rank of the adapters of linear=lora; null: 8
    lora_alpha: float | None = None  # scale of the adapters, alpha / rank; null: 16
    lora_targets: list[str] | None = None  # projections that have an adapter; null: all
    rope_theta: float = 10000.0  # base of RoPE's wavelengths; lower values suit short contexts
    rope_scaling: list[float] | None = None  # [factor, low, high, context], as in Llama 3; null: none
    previous_token_init: int = 0  # number of first layers whose heads start on previous tokens
    vocab_rows: int | None = None  # rows of the embedding; null: one for each token
    residual_scale: float | None = None  # factor of initial o_proj, down_proj; null: 1/sqrt(2 n_layers)

    def __post_init__(self) -> None:
        for key, path in user_classes(self).items():
            if "." not in path or not all(part.isidentifier() for part in path.split(".")):
                choices = ", ".join(CLASSES[key])
                raise UserError(f"{key}={path}: choose one of {choices}, or the dotted path of a class")
        sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab_rows", "lora_rank")
        others = ("rope_theta", "norm_eps", "lora_alpha")
        check_settings("model.", self, *sizes, *others, norm_order=NORM_ORDERS)
        require(self.dropout < 1, f"model.dropout={self.dropout}", "less than 1")
        setting = f"model.attention_bias={self.attention_bias}"
        require(self.attention_bias in (None, False, True, "qkv"), setting, "true, false, qkv or null")

        if self.d_head is None and self.d_model % self.n_heads:
            raise UserError(f"model.d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}")
        if self.n_heads % self.kv_heads:
            raise UserError(f"model.n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.kv_heads}")
        if self.position == "rope" and self.head_dim % 2:
            key = "d_model/n_heads" if self.d_head is None else "model.d_head"
            raise UserError(f"model.position=rope needs an even head width, not {key}={self.head_dim}")
        if self.position != "rope":
            chosen = f"model.position={self.position}"
            check_unused("model.", self, chosen, "previous_token_init", "rope_scaling")
        if self.norm == "none":
            check_unused("model.", self, "model.norm=none", "previous_token_init", "qk_norm")
        if (numbers := self.rope_scaling) is not None:
            is_scaling = len(numbers) == 4 and min(numbers) > 0 and numbers[1] < numbers[2]
            expected = "[factor, low_freq_factor, high_freq_factor, original_context], such as [32,1,4,8192]"
            require(is_scaling, f"model.rope_scaling={numbers}", expected)

        if self.linear != "lora":
            chosen = f"model.linear={self.linear}"
            check_unused("model.", self, chosen, "lora_rank", "lora_alpha", "lora_targets")
        require(self.lora_targets != [], "model.lora_targets=[]", "one projection or more; null means all")
        for name in self.adapted:
            require_choice("model.lora_targets", name, self.projections)

    @property
    def projections(self) -> tuple[str, ...]:
        return tuple(name for name in PROJECTIONS if name != "gate_proj" or self.ffn in GATED)

    # What the model reads in place of a setting that may be null.

    @property
    def rank(self) -> int:
        return self.lora_rank or 8

    @property
    def alpha(self) -> float:
        return 16.0 if self.lora_alpha is None else self.lora_alpha

    @property
    def adapted(self) -> tuple[str, ...]:
        """Return the names of the projections that have an adapter."""
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


def user_classes(config: ModelConfig) -> dict[str, str]:
    """Return the settings that name a class of the user, such as model.ffn, with the path of the class."""
    named = {key: getattr(config, key.removeprefix("model.")) for key in CLASSES}
    return {key: path for key, path in named.items() if path not in CLASSES[key]}


def classes_word(settings: Mapping[str, Any]) -> list[str]:
    """Return the word of a command that lets a model import the classes of the user; none for a model without."""
    classes = [settings[key] for key, built_in in CLASSES.items() if settings.get(key) not in (None, *built_in)]
    return [f"classes=[{','.join(classes)}]"] if classes else []


# Settings that each kind of head needs. A head accepts no setting of other heads.
HEAD_SETTINGS: dict[str, tuple[str, ...]] = {
    "tied": (),
    "untied": ("head_std", "head_lr_multiplier"),
    "tied_projected": ("head_lr_multiplier",),
    "untied_from_embedding": ("head_lr_multiplier",),
    "untied_midtraining": ("head_lr_multiplier", "untie_at"),
}
HEADS = tuple(HEAD_SETTINGS)


@dataclass(slots=True, kw_only=True)
class HeadConfig:
    """The LM head, tied to the embedding or not, with its initialisation and learning rates.

    `kind` is the key of the class in HEADS of lm/model/head.py. The multipliers scale
    optim.adam_lr, or optim.lr where adam_lr is null. The defaults are the values of
    configs/head/tied.yaml, except for the tuned embedding_lr_multiplier.

    >>> HeadConfig(kind="untied", embedding_std=1.0, head_std=0.01, head_lr_multiplier=1.0).kind
    'untied'
    """

    name: str = unhashed("tied")  # name of the head in folders and results: its file in configs/head
    kind: str = "tied"  # how the LM head and the embedding share weights; see configs/head/
    embedding_std: float | None = None  # initial std of the embedding; null: 1/sqrt(d_model)
    embedding_multiplier: float | None = 1.0  # factor of the input embeddings; null: sqrt(d_model)
    embedding_lr_multiplier: float = 1.0  # learning rate of the embedding, in units of optim.adam_lr (AdamW: optim.lr)
    head_std: float | None = None  # initial std of the head's own matrix
    head_lr_multiplier: float | None = None  # learning rate of the LM head, in units of optim.adam_lr (AdamW: optim.lr)
    untie_at: float | None = None  # fraction of training at which the head is untied

    def __post_init__(self) -> None:
        check_settings("head.", self, kind=HEADS)
        check_kind("head.", self, "kind", HEAD_SETTINGS)
        require((self.untie_at or 0) <= 1, f"head.untie_at={self.untie_at}", "0 to 1, a fraction of training")


# --- text and tokenizer

SOURCES = ("stdlib", "text", "json", "csv", "parquet", "hub", "tokens")
TABLES = ("json", "csv", "parquet", "hub")
# Settings that only some sources have.
SOURCE_SETTINGS: dict[str, tuple[str, ...]] = {
    "name": ("hub",),
    "revision": ("hub",),
    "split": ("hub",),
    "val_split": ("hub",),
    "val_path": ("text", "json", "csv", "parquet", "tokens"),
    "sha256": ("text",),
    "separator": ("text",),
    "max_bytes": ("stdlib", "text", *TABLES),
    "column": TABLES,
    "rows": TABLES,
}
TOKENIZER_SETTINGS: dict[str, tuple[str, ...]] = {"bpe": ("vocab_size",), "char": (), "byte": (), "file": ("path",)}
TOKENIZERS = tuple(TOKENIZER_SETTINGS)
# The largest text in bytes that a recipe is for. A larger text gets the default run.
RECIPES = {
    20_000: "chars_10k",
    60_000: "chars_30k",
    200_000: "chars_100k",
    700_000: "bpe_300k",
    2_000_000: "bpe_1m",
}


def recipe_of(n_bytes: float) -> str:
    """Return the experiment that suits a text of so many bytes.

    >>> recipe_of(300_000), recipe_of(10**9)
    ('bpe_300k', 'none')
    """
    return next((name for most, name in RECIPES.items() if n_bytes <= most), "none")


def default_cache() -> str:
    """Return a folder in the cache of the user, the same for all working directories."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lm_lab")


@dataclass(slots=True, kw_only=True)
class DataConfig:
    """The source of the text, its split, and the size of a batch."""

    source: str = unhashed("stdlib")  # kind of text; the group data chooses it
    path: str | None = unhashed(None)  # file, folder, glob, URL, or the Hub's owner/name
    sha256: str | None = unhashed(None)  # text: hash that its one file must have, decompressed
    name: str | None = unhashed(None)  # hub: configuration of a data set that has several
    revision: str | None = unhashed(None)  # hub: commit, tag or branch; null: newest commit of main
    split: str = unhashed("train")  # hub: split to read
    val_split: str | None = unhashed(None)  # hub: split that is the validation text; null: a part is held out
    val_path: str | None = unhashed(None)  # files: path of the validation text; null: a part is held out
    separator: str | None = unhashed(None)  # text: word that ends a document; null: a file is a document
    column: str = unhashed("text")  # tables: column that holds the text
    rows: str = unhashed("documents")  # tables: meaning of the rows: documents, or lines of one text
    seq_len: int = 128  # tokens of a training window, and the model's longest context
    batch_size: int = 8  # sequences per optimizer step on one device
    order: str = "windows"  # what each epoch shuffles: windows, or documents before the cut into windows
    val_fraction: float = 0.1  # fraction of the text that is held out for validation
    fold: float | None = None  # number of the held-out part, from 0, of round(1/val_fraction) parts; null: last
    document_mask: bool = False  # whether a token attends to its own document alone
    val_max_bytes: int | None = unhashed(4_000_000)  # most bytes that val_fraction holds out; null: any
    max_bytes: int | None = unhashed(None)  # bytes of text that are read; null: all
    overfit_batches: int = 0  # number of first batches that are repeated; 0: train on all batches
    cache_dir: str = unhashed(default_factory=default_cache)  # cache of tokens

    def __post_init__(self) -> None:
        expand_paths(self, "path", "val_path")
        counts = ("seq_len", "batch_size", "max_bytes", "val_max_bytes")
        orders, rows = ("windows", "documents"), ("documents", "lines")
        check_settings("data.", self, *counts, source=SOURCES, order=orders, rows=rows)
        holds_a_character = self.val_max_bytes is None or self.val_max_bytes >= 4  # bytes of the longest character
        require(holds_a_character, f"data.val_max_bytes={self.val_max_bytes}", "4 or more")
        require(0 < self.val_fraction < 1, f"data.val_fraction={self.val_fraction}", "between 0 and 1")
        if self.source == "stdlib" and self.path is not None:
            raise UserError(f"data.path={self.path}: data=stdlib reads no file; add data=text")
        for key in SOURCE_SETTINGS:
            require(getattr(self, key) != "", f"data.{key}=", "a value, or null")
        form = "OWNER/NAME" if self.source == "hub" else "FILE"
        expected = f"data.path={form} with data.source={self.source}"
        require(bool(self.path) or self.source == "stdlib", f"data.path={self.path or ''}", expected)
        unused = [key for key, sources in SOURCE_SETTINGS.items() if self.source not in sources]
        check_unused("data.", self, f"data.source={self.source}", *unused)
        if None not in (self.separator, self.sha256, self.max_bytes):
            raise UserError(f"data.max_bytes={self.max_bytes}: expected null with data.separator and data.sha256")
        for key, train in (("val_path", self.path), ("val_split", self.split)):
            if (value := getattr(self, key)) is None:
                continue
            require(value != train, f"data.{key}={value}", "another text than the training text")
            check_unused("data.", self, f"data.{key}={value}", "val_fraction", "val_max_bytes", "fold")
        if self.fold is not None:
            require(self.n_folds > 1, f"data.val_fraction={self.val_fraction}", "2/3 or less with data.fold")
            expected = f"0 to {self.n_folds - 1} with data.val_fraction={self.val_fraction}"
            is_place = self.fold <= self.n_folds - 1 and 2 * self.fold % 1 == 0
            require(is_place, f"data.fold={self.fold}", f"{expected}; 0.5 lies half a part further than 0")

    @property
    def n_folds(self) -> int:
        return round(1 / self.val_fraction)

    @property
    def cache(self) -> Path:
        """Return the folder that cache_dir names. Raises UserError if no home is known."""
        return Path(os.path.expanduser(self.cache_dir))


@dataclass(slots=True, kw_only=True)
class TokenizerConfig:
    kind: str = unhashed("bpe")  # bpe, char, byte or file
    vocab_size: int | None = unhashed(2048)  # bpe: largest number of tokens, end of text included
    path: str | None = unhashed(None)  # file: a tokenizer.json of the tokenizers library

    def __post_init__(self) -> None:
        expand_paths(self, "path")
        check_settings("tokenizer.", self, kind=TOKENIZERS)
        if self.kind == "bpe" and (self.vocab_size or 0) < 257:
            raise UserError(f"tokenizer.vocab_size={self.vocab_size}: bpe needs 257 or more (256 bytes, end of text)")
        check_kind("tokenizer.", self, "kind", TOKENIZER_SETTINGS)


# --- training

OPTIMIZER_SETTINGS = {"adamw": (), "muon": ("adam_lr", "momentum", "ns_steps")}


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """An optimizer. Its learning rate is a linear warm-up times a decay, both functions of the step.

    The defaults are the values of optim=adamw. configs/optim/muon.yaml is the default of train.py.
    """

    name: str = "adamw"  # adamw or muon
    lr: float = 3e-3  # learning rate of the block matrices; if optim.adam_lr is null, of all weights
    adam_lr: float | None = None  # muon: learning rate of all other weights; head.*_lr_multiplier scale it
    lr_scale: float = 1.0  # factor of the peak learning rate of every parameter group
    momentum: float | None = None  # muon: decay of the moving average of the gradients
    ns_steps: int | None = None  # muon: Newton-Schulz steps that orthogonalise the update
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW: decays of both averages
    eps: float = 1e-8  # AdamW: number added to the denominator
    ema: float | None = None  # decay of averaged weights, as 0.999; the average is scored and saved; null: none
    weight_decay: float = 0.1  # weight decay of the block matrices; all other weights have none
    warmup_steps: int = 50  # steps over which the learning rate rises from 0
    decay: str = "linear"  # linear, cosine or constant
    decay_fraction: float = 1.0  # last fraction of the run, over which the learning rate decays
    final_lr_fraction: float = 0.0  # learning rate at the end, as a fraction of the peak

    def __post_init__(self) -> None:
        check_settings("optim.", self, name=OPTIMIZER_SETTINGS, decay=("linear", "cosine", "constant"))
        check_kind("optim.", self, "name", OPTIMIZER_SETTINGS)
        require((self.momentum or 0) < 1, f"optim.momentum={self.momentum}", "from 0 to below 1")
        require(self.ns_steps is None or 1 <= self.ns_steps <= 7, f"optim.ns_steps={self.ns_steps}", "1 to 7")
        are_decays = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(are_decays, f"optim.betas={self.betas}", "two numbers from 0 to below 1")
        is_decay = self.ema is None or 0 < self.ema < 1
        require(is_decay, f"optim.ema={self.ema}", "between 0 and 1, or null for no average")
        require(self.decay_fraction <= 1, f"optim.decay_fraction={self.decay_fraction}", "0 to 1")
        if self.decay == "constant":
            check_unused("optim.", self, "optim.decay=constant", "decay_fraction", "final_lr_fraction")


ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
PRECISIONS = ("auto", "32-true", "bf16-mixed")  # fp16 would need loss scaling
# Sharded strategies would split the weights that Muon, validation and checkpoints need whole.
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """The place and the length of a training, under the names of Lightning's Trainer."""

    accelerator: str = "auto"  # cpu, gpu, cuda or mps; auto: the best device of this machine
    devices: int = 1  # number of devices on each node
    num_nodes: int = 1  # number of machines
    strategy: str = "auto"  # ddp or a variant of it; auto: ddp on several devices
    precision: str = "auto"  # 32-true or bf16-mixed; auto: bf16-mixed where it is native
    max_steps: int = 1600  # number of optimizer steps, unless max_tokens, max_minutes or trainer.max_epochs is set
    max_epochs: float | None = None  # length in readings of the training text, rounded up to steps
    accumulate_grad_batches: int = 1  # number of micro-batches that a batch is divided into
    gradient_clip_val: float | None = 1.0  # largest norm of the gradient; null or 0: no clipping
    log_every_n_steps: int = unhashed(10)  # optimizer steps between rows of metrics.csv
    enable_progress_bar: bool = unhashed(True)  # whether progress is shown on standard error
    detect_anomaly: bool = unhashed(False)  # whether the first NaN in a gradient ends the run; slow

    def __post_init__(self) -> None:
        counts = ("devices", "num_nodes", "max_steps", "max_epochs", "accumulate_grad_batches", "log_every_n_steps")
        choices = {"accelerator": ACCELERATORS, "strategy": STRATEGIES, "precision": PRECISIONS}
        check_settings("trainer.", self, *counts, **choices)

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


@dataclass(slots=True, kw_only=True)
class TensorBoardConfig:
    dir: str | None = unhashed(None)  # folder; null: tensorboard/ in the directory of the run

    def __post_init__(self) -> None:
        expand_paths(self, "dir")


@dataclass(slots=True, kw_only=True)
class WandbConfig:
    project: str = unhashed("lm")  # project that lists the runs
    offline: bool = unhashed(False)  # whether the run stays on this machine until `wandb sync`
    dir: str | None = unhashed(None)  # folder; null: wandb/ in the directory of the run

    def __post_init__(self) -> None:
        expand_paths(self, "dir")


@dataclass(slots=True, kw_only=True)
class LoggerConfig:
    """Trackers beside metrics.csv. logger=NAME chooses one, logger=[NAME,NAME] several."""

    tensorboard: TensorBoardConfig | None = unhashed(None)
    wandb: WandbConfig | None = unhashed(None)


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    every: int = unhashed(100)  # optimizer steps between checkpoints
    keep: int = unhashed(2)  # number of newest checkpoints that are kept
    resume: bool = unhashed(True)  # whether an unfinished run resumes; false: it starts again
    best: bool = False  # whether model/ is the model with the lowest val/loss, not the last model
    patience: int | None = None  # number of validations without a lower val/loss that end the run; null: no early end

    def __post_init__(self) -> None:
        check_settings("checkpoint.", self, "every", "keep", "patience")


@dataclass(slots=True, kw_only=True)
class ValidationConfig:
    """Validation during training on evenly spaced windows. The last validation covers the whole text.

    Both settings decide the run if a validation chooses the model or ends the run.
    """

    every: int = unhashed(100)  # optimizer steps between validations; 0: only at the end
    batches: int | None = unhashed(16)  # number of batches that a validation during training scores; null: whole text

    def __post_init__(self) -> None:
        check_settings("validation.", self, "batches")


@dataclass(slots=True, kw_only=True)
class DiagnosticsConfig:
    every: int = unhashed(0)  # optimizer steps between rows of diagnostics.csv; 0: no such file

    def __post_init__(self) -> None:
        check_settings("diagnostics.", self)


LOSSES = ("auto", "plain", "chunked")
NO_LIMIT = 1_000_000_000  # steps of a run whose length needs a text or a clock
TIED_MATRICES = ("embedding", "head", "mean")


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a training run, and the place of the run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)
    init_from: str | None = unhashed(None)  # finished run that gives the weights and the tokenizer
    init_sha256: str | None = None  # hash of the weights of init_from; null: read from init_from
    init_tied_matrix: str | None = None  # tied matrix of an untied init_from: embedding, head or mean
    prompts: list[str] | None = unhashed(None)  # prompts of the samples; null: three from the text
    max_tokens: int | None = unhashed(None)  # length in tokens, rounded up to whole steps
    max_minutes: float | None = None  # length in minutes, from which the steps are computed on this machine
    seed: int = 0  # random seed of initial weights, order of batches, and dropout
    threads: int | None = unhashed(None)  # threads of torch; null: OMP_NUM_THREADS, else all cores
    loss: str = "auto"  # plain or chunked, which compute the same; auto: the faster one
    ngram_smoothing: float = 0.0  # weight of an n-gram model in each target; 0: the true token alone
    loss_temperature: float = 1.0  # number that training divides the logits by
    activation_checkpointing: bool = unhashed(False)  # whether blocks are computed twice: less memory, 1/3 more FLOPs
    compile: bool = False  # whether torch.compile compiles the steps; see docs/performance.md
    run_dir: str | None = unhashed(None)  # directory of the run; null: runs/NAME, where NAME ends in the run's hash
    other_code: bool = unhashed(False)  # whether a run of another version of the code may be resumed

    def __post_init__(self) -> None:
        expand_paths(self, "run_dir", "init_from")
        positive = ("loss_temperature", "max_minutes", "max_tokens", "threads")
        check_settings("", self, *positive, loss=LOSSES, init_tied_matrix=TIED_MATRICES)
        require(self.ngram_smoothing <= 1, f"ngram_smoothing={self.ngram_smoothing}", "0 to 1")
        require(self.run_dir != "", "run_dir: is empty", "a directory, or null for one under runs/")
        micro_batches, size = self.trainer.accumulate_grad_batches, self.data.batch_size
        if size % micro_batches:
            raise UserError(f"trainer.accumulate_grad_batches={micro_batches}: does not divide data.batch_size={size}")
        self._check_length()
        is_lora = self.model.linear == "lora"
        if is_lora or self.trainer.world_size > 1:
            where = "with model.linear=lora" if is_lora else "on several devices"
            require(self.head.untie_at is None, f"head.kind={self.head.kind}", f"another head {where}")
            require(self.diagnostics.every == 0, f"diagnostics.every={self.diagnostics.every}", f"0 {where}")
        if is_lora and self.init_tied_matrix is not None:
            raise UserError(f"init_tied_matrix={self.init_tied_matrix}: expected null with model.linear=lora")

    def _check_length(self) -> None:
        lengths = {
            "trainer.max_epochs": self.trainer.max_epochs,
            "max_tokens": self.max_tokens,
            "max_minutes": self.max_minutes,
        }
        given = [f"{key}={value:g}" for key, value in lengths.items() if value is not None]
        require(len(given) < 2, " ".join(given), "one length")
        every, patience = self.validation.every, self.checkpoint.patience
        for key, is_used in (("best", self.checkpoint.best), ("patience", patience is not None)):
            if is_used and not 0 < every < self.steps:
                reason = f"validation.every={every} gives a run of {self.steps} steps no validation"
                raise UserError(f"checkpoint.{key}: {reason}; choose validation.every below the steps")
        if patience is not None and self.diagnostics.every:
            raise UserError(f"diagnostics.every={self.diagnostics.every}: expected 0 with checkpoint.patience")

    @property
    def tokens_per_step(self) -> int:
        """Return the target positions of one optimizer step, on all devices together."""
        return self.data.batch_size * self.data.seq_len * self.trainer.world_size

    @property
    def steps(self) -> int:
        """Return the optimizer steps of the whole run; NO_LIMIT with max_epochs or max_minutes until resolved."""
        if self.max_tokens is not None:
            return math.ceil(self.max_tokens / self.tokens_per_step)
        if self.trainer.max_epochs is not None or self.max_minutes is not None:
            return NO_LIMIT
        return self.trainer.max_steps


# --- which run it is

# Settings that the machine and the text decide if the user leaves them open. config.yaml of a run
# has the decisions, and under `requested` the typed values.
REQUESTED = (
    "trainer.accelerator",
    "trainer.precision",
    "loss",
    "threads",
    "trainer.max_steps",
    "trainer.max_epochs",
    "max_minutes",
)
HASHES = ("data_hash", "tokenizer_hash")
# Settings of the length of a run: LENGTHS of a record, where max_tokens has become steps; TYPED_LENGTHS may be typed.
LENGTHS = ("trainer.max_steps", "trainer.max_epochs", "max_minutes")
TYPED_LENGTHS = (*LENGTHS, "max_tokens")


def change(run: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the run with dotted keys set; checked as if they had been typed."""
    groups: dict[str, dict[str, Any]] = {"": {}}
    for key, value in values.items():
        group, _, name = key.rpartition(".")
        groups.setdefault(group, {})[name] = value
    own = groups.pop("")
    return replace(run, **own, **{group: replace(getattr(run, group), **changes) for group, changes in groups.items()})


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        is_group = isinstance(value, dict) and value
        leaves |= flat(value, f"{prefix}{key}.") if is_group else {f"{prefix}{key}": value}
    return leaves


def fields_of(schema: Any, prefix: str = "") -> dict[str, Field[Any]]:
    """Return the fields of a dataclass by their dotted keys, the groups as well as what they hold."""
    by_key: dict[str, Field[Any]] = {}
    for item in fields(schema):
        by_key[prefix + item.name] = item
        for group in filter(is_dataclass, (item.type, *get_args(item.type))):
            by_key |= fields_of(group, f"{prefix}{item.name}.")
    return by_key


DECIDING = {
    key
    for key, item in fields_of(RunConfig).items()
    if item.metadata.get("hashed", True) and not is_dataclass(item.type)
}


def deciding_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that change a number of a run, as dotted keys, and the hashes, if given.

    Records of earlier versions lack some settings.
    """
    leaves, keys = flat(settings), DECIDING | {*HASHES}
    if leaves.get("checkpoint.best") or leaves.get("checkpoint.patience") is not None:
        keys |= {"validation.every", "validation.batches"}
    if leaves.get("data.val_path") is not None or leaves.get("data.val_split") is not None:
        keys -= {"data.val_fraction", "data.fold"}
    if leaves.get("compile"):  # a compiler fuses repeated operations otherwise
        keys |= {"activation_checkpointing"}
    if leaves.get("trainer.num_nodes", 1) > 1:  # the number of processes decides, not the places of the processes
        leaves["trainer.devices"] *= leaves["trainer.num_nodes"]
        leaves["trainer.num_nodes"] = 1
    return {key: value for key, value in leaves.items() if key in keys}


def check_init(run: RunConfig) -> None:
    """Raise UserError if the settings of the run need an init_from and there is no init_from."""
    if run.init_from is not None:
        return
    if run.model.linear == "lora":
        raise UserError("model.linear=lora: trains adapters of a finished model; add init_from=RUN")
    check_unused("", run, "init_from=null (init_from=RUN starts from a run)", "init_sha256", "init_tied_matrix")


def requested_settings(run: RunConfig) -> dict[str, Any]:
    """Return all settings of a run as they were asked for, by dotted keys, with max_tokens as steps."""
    settings = flat(asdict(run))
    if run.max_tokens is not None:
        settings["trainer.max_steps"], settings["max_tokens"] = run.steps, None
    return settings


def config_hash(run: RunConfig, data_hash: str = "", tokenizer_hash: str = "") -> str:
    """Return the SHA-256 of what was asked of a run and of its text.

    The hash is equal on all machines, because a setting that is left open enters the hash as requested.
    """
    hashes = {"data_hash": data_hash, "tokenizer_hash": tokenizer_hash}
    content = deciding_settings(requested_settings(run) | hashes)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def differing_keys(saved: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return the keys in which the run of a config.yaml and requested settings differ.

    A setting that the machine or the text decided agrees with the decision, with the earlier request,
    and with a request that leaves the setting open. The number of threads counts on a CPU, because
    this number changes the rounding there. A hash counts if both sides have the hash.
    """
    before, now = deciding_settings(saved), deciding_settings(settings)
    if saved["trainer"]["accelerator"] == "cpu":
        before["threads"], now["threads"] = saved["threads"], settings["threads"]
    keys = {*before, *now} - {*LENGTHS} - {key for key in HASHES if key not in before or key not in now}
    differing = [key for key in keys if not _agrees(key, before, now, saved["requested"])]
    is_same_length = length_of(now) in (length_of(before), length_of(before | saved["requested"]))
    return sorted(differing + ["length"] * (not is_same_length))


def length_of(settings: Mapping[str, Any]) -> str:
    """Return the length of a run, by its dotted keys, as one setting such as trainer.max_steps=20."""
    key = next((key for key in LENGTHS[1:] if settings.get(key) is not None), LENGTHS[0])
    return f"{key}={settings[key]}"


def _agrees(key: str, before: dict[str, Any], now: dict[str, Any], requested: dict[str, Any]) -> bool:
    value = now.get(key)
    if key in REQUESTED and value in ("auto", None):  # the decision is left to the machine
        return True
    if (key, value) == ("trainer.accelerator", "gpu"):  # a GPU of NVIDIA or of Apple
        return before[key] != "cpu"
    return value in (before.get(key), requested.get(key, before.get(key)))


# --- dataclasses from files


def literal(value: Any) -> Any:
    """Return text, or lists and dicts of text, in which OmegaConf takes ${key} for text.

    >>> literal("a ${b}.txt")
    'a \\\\${b}.txt'
    """
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list):
        return [literal(item) for item in value]
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    return value


def build(schema: Any, content: Any, key: str = "") -> Any:
    """Return the content of a JSON or YAML file as a dataclass. Raises UserError with a wrong key.

    Text of a file stays as it is: only a DictConfig, which was composed here, may have a ${key} that stands for more.
    """
    require(isinstance(content, Mapping | DictConfig), key or "its content", "keys with values")
    content = content if isinstance(content, DictConfig) else literal(content)
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), content))
    except UserError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        place = ".".join(filter(None, (key, str(getattr(error, "full_key", None) or ""))))
        reason = first_line(error)
        raise UserError(f"{place}: {reason}" if place else reason) from error
