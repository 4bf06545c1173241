"""A training run: everything that decides it, and its directory."""

import math
from dataclasses import dataclass, field
from typing import Any

from lm.config.checks import BadInput, at_least, choose, expect, seedable
from lm.config.data import DataConfig, TokenizerConfig
from lm.config.model import HeadConfig, ModelConfig
from lm.config.optim import OptimConfig

AUTO = "auto"
LOSSES = (AUTO, "plain", "chunked")
TIED_MATRICES = ("embedding", "head", "mean")
# without fp16, which would need loss scaling
PRECISIONS = ("auto", "32-true", "bf16-mixed", "bf16-true", "64-true", "32", "bf16", "64")


STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true", "single_device")
IN_WORKERS = "trains in processes whose model does not come back"
IN_PARTS = "splits weights or optimizer states, which Muon, validation and checkpoints need whole"
NO_STRATEGIES = {  # the beginning of a name of Lightning's -> why it cannot work here
    **dict.fromkeys(("ddp_spawn", "ddp_fork", "ddp_notebook"), IN_WORKERS),
    **dict.fromkeys(("fsdp", "deepspeed"), IN_PARTS),
    **dict.fromkeys(("xla", "single_xla", "single_tpu"), "is for TPUs, on which nothing here was tried"),
}


def check_strategy(name: Any, several: bool) -> None:
    """Refuse strategies of Lightning by name; one given as a class is checked when it has been built."""
    for beginning, why in NO_STRATEGIES.items():
        if str(name).startswith(beginning):
            raise BadInput(f"trainer.strategy={name}: {why}; use ddp")
    if isinstance(name, str):
        choose("trainer.strategy", name, STRATEGIES)
    if name == "single_device" and several:
        raise BadInput("trainer.strategy=single_device: trainer.devices and trainer.num_nodes ask for more; use ddp")


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    every: int = 100  # optimizer steps
    keep: int = 2
    resume: bool = True  # false: an unfinished run starts from step 0 again

    def __post_init__(self) -> None:
        at_least(1, "checkpoint.", self, "every", "keep")


@dataclass(slots=True, kw_only=True)
class ValidationConfig:
    """Validation during training, an estimate on evenly spaced windows; the final one covers the whole text."""

    every: int = 100  # optimizer steps; 0: only at the end
    batches: int | None = 16  # of data.batch_size windows; null: the whole text

    def __post_init__(self) -> None:
        at_least(0, "validation.", self, "every")
        at_least(1, "validation.", self, "batches")


@dataclass(slots=True, kw_only=True)
class DiagnosticsConfig:
    """Measurements of the embedding and the head during training; see lm/training/diagnostics.py."""

    every: int = 0  # optimizer steps; 0: never

    def __post_init__(self) -> None:
        at_least(0, "diagnostics.", self, "every")


FROZEN = "with model.linear=lora, the embedding and the head do not change"


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
    init_from: str | None = None  # a finished run, whose weights and tokenizer this run starts from
    init_sha256: str | None = None  # of those weights; null: any, and found out when they are read
    init_tied_matrix: str | None = None  # untied to tied: embedding, head or mean, where the one matrix comes from
    prompts: list[str] | None = None  # continued greedily at the end; null: three from the validation text
    max_tokens: int | None = None  # length of the run, rounded up to whole steps; overrides trainer.max_steps
    seed: int = 0
    threads: int | str | None = None  # null: OMP_NUM_THREADS, else the cores; auto: measured when the run begins
    loss: str = "auto"  # plain or chunked compute the same; auto: the faster one
    activation_checkpointing: bool = False  # recompute blocks in the backward pass: less memory, 1/3 more FLOPs
    compile: bool = False  # torch.compile: faster in long runs, see benchmark.py only=[compile]
    run_dir: str | None = None  # null: runs/, under a name that ends in the hash of this configuration

    def __post_init__(self) -> None:
        choose("loss", self.loss, LOSSES)
        if self.init_tied_matrix is not None:
            choose("init_tied_matrix", self.init_tied_matrix, TIED_MATRICES)
        at_least(1, "", self, "max_tokens")
        if isinstance(self.threads, int):
            at_least(1, "", self, "threads")
        elif self.threads not in (None, AUTO):
            raise BadInput(f"threads={self.threads}: expected a number of threads, {AUTO} or null")
        seedable(self.seed)
        if self.model.linear == "lora":
            self.check_frozen()
        if self.run_dir == "":
            raise BadInput("run_dir: is empty; expected a directory, or null for one under runs/")
        self.check_trainer()

    def check_frozen(self) -> None:
        """Refuse what would change a matrix that adapters leave as it is, or measure its gradient."""
        if self.head.untie_at is not None:
            raise BadInput(f"head.kind={self.head.kind}: {FROZEN}; choose head=untied_from_embedding")
        if self.init_tied_matrix is not None:
            raise BadInput(f"init_tied_matrix={self.init_tied_matrix}: {FROZEN}")
        if self.diagnostics.every:
            raise BadInput(f"diagnostics.every={self.diagnostics.every}: {FROZEN}")
        if self.trainer.get("precision") == "bf16-true":
            raise BadInput(f"trainer.precision=bf16-true: would round weights; {FROZEN}; choose bf16-mixed")

    def check_base(self) -> None:
        """Raise BadInput if the run needs an init_from and has none."""
        if self.model.linear == "lora" and self.init_from is None:
            raise BadInput("model.linear=lora: trains adapters of a finished model; add init_from=RUN")

    def check_trainer(self) -> None:
        """Check Lightning's arguments as far as possible without importing it, which takes seconds."""
        given = {**SINGLE, "max_steps": 1, **self.trainer}
        for key in given.keys() & set(OURS):
            raise BadInput(f"trainer.{key}: {DECIDED}")
        for key in SINGLE:
            expect(type(given[key]) is int and given[key] >= 1, f"trainer.{key}={given[key]}", "a number, 1 or more")
        steps, accumulate = given["max_steps"], given["accumulate_grad_batches"]
        if self.max_tokens is None and (type(steps) is not int or steps < 1):
            raise BadInput(f"trainer.max_steps={steps}: expected a number of steps, 1 or more")
        if self.data.batch_size % accumulate:
            raise BadInput(
                f"trainer.accumulate_grad_batches={accumulate}: does not divide data.batch_size={self.data.batch_size}"
            )
        if (n_tokens := self.data.batch_size // accumulate * self.data.seq_len) > MOST_TOKENS:
            times = f"data.batch_size * data.seq_len{' / trainer.accumulate_grad_batches' if accumulate > 1 else ''}"
            raise BadInput(f"{times}={n_tokens}: expected at most {MOST_TOKENS} tokens in memory at a time")
        choose("trainer.precision", str(given.get("precision") or "auto"), PRECISIONS)
        clip = given.get("gradient_clip_val")
        if clip is not None and not (isinstance(clip, int | float) and 0 <= clip < math.inf):
            raise BadInput(f"trainer.gradient_clip_val={clip}: expected 0 (no clipping) or more")
        several = given["devices"] * given["num_nodes"] > 1
        check_strategy(given.get("strategy") or "auto", several)
        if several:
            if self.head.untie_at is not None:
                raise BadInput(
                    "head.kind=untied_midtraining: trains on one device only; choose trainer.devices=1 or another head"
                )
            if self.threads == AUTO:
                raise BadInput(f"threads={AUTO}: measures on one device only; give a number of threads")
            if self.diagnostics.every:
                raise BadInput(
                    f"diagnostics.every={self.diagnostics.every}: measures on one device only; choose trainer.devices=1"
                )


# Settings that do not change what a run computes: left out of its hash, and free to differ when it is resumed.
RUNTIME = (
    *("config_hash", "data_revision", "run_dir", "logger", "checkpoint", "prompts", "init_from", "base"),
    *("activation_checkpointing", "data.cache_dir", "data.verify", "trainer.enable_progress_bar"),
)

MOST_TOKENS = 2**24  # in a batch on one device: the smallest of models needs gigabytes for them

# Arguments of lightning.Trainer that are counts, with their defaults.
SINGLE = {"devices": 1, "num_nodes": 1, "accumulate_grad_batches": 1}

# Arguments of lightning.Trainer that this project sets itself.
OURS = (
    *("max_epochs", "min_epochs", "min_steps", "max_time", "fast_dev_run", "overfit_batches", "barebones"),
    *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"),
    *("enable_checkpointing", "enable_model_summary", "use_distributed_sampler", "default_root_dir"),
    *("callbacks", "plugins", "logger", "gradient_clip_algorithm", "reload_dataloaders_every_n_epochs"),
)
DECIDED = "is decided by this project; see max_tokens, validation, checkpoint and logger"
