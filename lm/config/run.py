"""A training run: everything that decides it, and its directory."""

import math
from dataclasses import dataclass, field

from lm.config.checks import UserError, expand_paths, require, require_choice, require_min, require_seed
from lm.config.data import DataConfig, TokenizerConfig
from lm.config.model import HeadConfig, ModelConfig

OPTIMIZERS = ("adamw", "muon")
DECAYS = ("cosine", "linear", "constant")
PRECISIONS = ("auto", "32-true", "bf16-mixed")  # without fp16, which would need loss scaling
# Sharded strategies would split the weights that Muon, validation and checkpoints need whole.
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_false", "ddp_find_unused_parameters_true")
LOSSES = ("auto", "plain", "chunked")
NO_LIMIT = 1_000_000_000  # steps of a run whose length is a time
SAMPLE_TEMPERATURE = 0.8  # of drawn samples, whose seed is the number of their prompt: equal seeds give similar texts
TIED_MATRICES = ("embedding", "head", "mean")


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """An optimizer; its learning rate is a linear warm-up times a decay, both pure functions of the step.

    The defaults are those of optim=adamw. The default of train.py is configs/optim/muon.yaml.
    """

    name: str = "adamw"  # adamw or muon
    lr: float = 3e-3  # of the matrices of the transformer blocks, and of all else where adam_lr is null
    adam_lr: float | None = None  # muon: learning rate of all else; head.*_lr_multiplier multiply it
    momentum: float | None = None  # muon: decay factor of the moving average of the gradients
    ns_steps: int | None = None  # muon: Newton-Schulz steps that orthogonalise the update
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW: decay factors of the moving averages
    eps: float = 1e-8  # AdamW: added to the denominator
    ema: float | None = None  # decay of an average of the weights over steps, as 0.999, which is the model; null: none
    weight_decay: float = 0.1  # of the matrices of the transformer blocks; all else has none
    warmup_steps: int = 50  # steps over which the learning rate rises from 0
    decay: str = "linear"  # linear, cosine or constant
    decay_fraction: float = 1.0  # the last fraction of the run, over which the learning rate decays
    final_lr_fraction: float = 0.0  # the learning rate at which the decay ends, as a fraction of lr (or adam_lr)

    def __post_init__(self) -> None:
        require_choice("optim.name", self.name, OPTIMIZERS)
        require_choice("optim.decay", self.decay, DECAYS)
        rates = ("lr", "adam_lr", "eps", "weight_decay", "final_lr_fraction")
        require_min(0, "optim.", self, *rates, "warmup_steps", "decay_fraction")
        require(self.ns_steps is None or 1 <= self.ns_steps <= 7, f"optim.ns_steps={self.ns_steps}", "1 to 7")
        for key in ("adam_lr", "momentum", "ns_steps"):
            if (self.name == "muon") != (getattr(self, key) is not None):
                raise UserError(f"optim.{key}={getattr(self, key)}: expected with optim=muon, and only there")
        require(0 <= (self.momentum or 0) < 1, f"optim.momentum={self.momentum}", "from 0 to below 1")
        are_factors = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(are_factors, f"optim.betas={self.betas}", "two numbers from 0 to below 1")
        require(
            self.ema is None or 0 < self.ema < 1, f"optim.ema={self.ema}", "between 0 and 1, or null for no average"
        )
        require(self.decay_fraction <= 1, f"optim.decay_fraction={self.decay_fraction}", "0 to 1")


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """Where and how long a run is trained, under the names of Lightning's Trainer."""

    accelerator: str = "auto"  # cpu, gpu, cuda or mps; auto: the best that there is
    devices: int = 1  # on each node
    num_nodes: int = 1  # machines
    strategy: str = "auto"  # auto: ddp on several devices
    precision: str = "auto"  # 32-true, or bf16-mixed; auto: bf16-mixed where it is native
    max_steps: int = 1600  # optimizer steps
    accumulate_grad_batches: int = 1  # micro-batches into which the batch of a step is divided
    gradient_clip_val: float | None = 1.0  # largest norm of the gradient; null or 0: no clipping
    log_every_n_steps: int = 10  # optimizer steps between rows of metrics.csv
    enable_progress_bar: bool = True  # also lines about the progress where there is no terminal
    detect_anomaly: bool = False  # stop at the operation whose gradient is NaN; slow

    def __post_init__(self) -> None:
        require_choice("trainer.accelerator", self.accelerator, ("auto", "cpu", "gpu", "cuda", "mps"))
        require_choice("trainer.strategy", self.strategy, STRATEGIES)
        require_choice("trainer.precision", self.precision, PRECISIONS)
        counts = ("devices", "num_nodes", "max_steps", "accumulate_grad_batches", "log_every_n_steps")
        require_min(1, "trainer.", self, *counts)
        require_min(0, "trainer.", self, "gradient_clip_val")

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


@dataclass(slots=True, kw_only=True)
class TensorBoardConfig:
    dir: str | None = None  # null: tensorboard/ in the directory of the run


@dataclass(slots=True, kw_only=True)
class WandbConfig:
    project: str = "lm"  # under which the runs are listed
    offline: bool = False  # keep it on this machine; `wandb sync` sends it later
    dir: str | None = None  # null: wandb/ in the directory of the run


@dataclass(slots=True, kw_only=True)
class LoggerConfig:
    """Experiment trackers beside metrics.csv. logger=NAME chooses one, logger=[NAME,NAME] several."""

    tensorboard: TensorBoardConfig | None = None
    wandb: WandbConfig | None = None

    def __post_init__(self) -> None:
        for name, tracker in (("tensorboard", self.tensorboard), ("wandb", self.wandb)):
            if tracker is not None:
                expand_paths(f"logger.{name}.", tracker, "dir")


@dataclass(slots=True, kw_only=True)
class CheckpointConfig:
    every: int = 100  # optimizer steps
    keep: int = 2  # the newest so many
    resume: bool = True  # false: an unfinished run starts from step 0 again
    best: bool = False  # true: model/ is the validated model of the lowest val/loss, not the last one
    patience: int | None = None  # validations in a row without a lower val/loss, after which the run ends; null: any

    def __post_init__(self) -> None:
        require_min(1, "checkpoint.", self, "every", "keep", "patience")


@dataclass(slots=True, kw_only=True)
class ValidationConfig:
    """Validation during training, an estimate on evenly spaced windows; the final one covers the whole text."""

    every: int = 100  # optimizer steps; 0: only at the end
    batches: int | None = 16  # of data.batch_size windows; null: the whole text

    def __post_init__(self) -> None:
        require_min(0, "validation.", self, "every")
        require_min(1, "validation.", self, "batches")


@dataclass(slots=True, kw_only=True)
class DiagnosticsConfig:
    """Measurements of the embedding and the head during training; see lm/lab/measures/diagnostics.py."""

    every: int = 0  # optimizer steps; 0: never

    def __post_init__(self) -> None:
        require_min(0, "diagnostics.", self, "every")


@dataclass(slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a training run, and where it goes."""

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
    init_from: str | None = None  # a finished run, whose weights and tokenizer this run starts from
    init_sha256: str | None = None  # of those weights; null: any, and found out when they are read
    init_tied_matrix: str | None = None  # untied to tied: embedding, head or mean, where the one matrix comes from
    prompts: list[str] | None = None  # continued greedily at the end; null: three from the validation text
    max_tokens: int | None = None  # length of the run, rounded up to whole steps; overrides trainer.max_steps
    max_minutes: float | None = None  # of training and validation: as many steps as take so long here, by timing some
    seed: int = 0  # of weights, batches and dropout
    threads: int | None = None  # of torch on the CPU; null: OMP_NUM_THREADS, else the number of cores
    loss: str = "auto"  # plain or chunked compute the same; auto: the faster one
    ngram_smoothing: float = 0.0  # the share of each training target that is what an n-gram model expects there
    loss_temperature: float = 1.0  # training divides the logits by it; less than 1 for a text that is read many times
    activation_checkpointing: bool = False  # recompute blocks in the backward pass: less memory, 1/3 more FLOPs
    compile: bool = False  # compile the steps by torch.compile; see docs/performance.md
    run_dir: str | None = None  # null: runs/, under a name that ends in the hash of this configuration

    def __post_init__(self) -> None:
        expand_paths("", self, "run_dir", "init_from")
        require_choice("loss", self.loss, LOSSES)
        require(0 <= self.ngram_smoothing <= 1, f"ngram_smoothing={self.ngram_smoothing}", "0 to 1")
        require(0 < self.loss_temperature < math.inf, f"loss_temperature={self.loss_temperature}", "more than 0")
        require_choice("init_tied_matrix", self.init_tied_matrix, TIED_MATRICES)
        require_min(1, "", self, "max_tokens", "threads")
        require_seed(self.seed)
        require(self.run_dir != "", "run_dir: is empty", "a directory, or null for one under runs/")
        self._check_length()
        micro_batches, size = self.trainer.accumulate_grad_batches, self.data.batch_size
        if size % micro_batches:
            raise UserError(f"trainer.accumulate_grad_batches={micro_batches}: does not divide data.batch_size={size}")
        is_lora = self.model.linear == "lora"
        if is_lora or self.trainer.world_size > 1:
            where = "with model.linear=lora" if is_lora else "on several devices"
            require(self.head.untie_at is None, f"head.kind={self.head.kind}", f"another head {where}")
            require(self.diagnostics.every == 0, f"diagnostics.every={self.diagnostics.every}", f"0 {where}")
        if is_lora:  # the embedding and the head keep their weights
            require(self.init_tied_matrix is None, f"init_tied_matrix={self.init_tied_matrix}", f"null {where}")

    def _check_length(self) -> None:
        if (minutes := self.max_minutes) is not None:
            require(0 < minutes <= 2**53, f"max_minutes={minutes}", "more than 0, at most 2**53")
            require(self.max_tokens is None, f"max_minutes={minutes}", "null beside max_tokens, the length in tokens")
        every = self.validation.every
        for key, is_used in (("best", self.checkpoint.best), ("patience", self.checkpoint.patience is not None)):
            if is_used and not 0 < every < self.steps:
                reason = f"validation.every={every} gives a run of {self.steps} steps no validation"
                raise UserError(f"checkpoint.{key}: {reason}; choose validation.every below the steps")
        if self.checkpoint.patience is not None:
            require(self.diagnostics.every == 0, f"diagnostics.every={self.diagnostics.every}", "0 with patience")

    @property
    def tokens_per_step(self) -> int:
        """Target positions of one optimizer step, on all devices together."""
        return self.data.batch_size * self.data.seq_len * self.trainer.world_size

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run; with max_minutes, before these are counted, a number that none reaches."""
        if self.max_minutes is not None:
            return NO_LIMIT
        return self.trainer.max_steps if self.max_tokens is None else math.ceil(self.max_tokens / self.tokens_per_step)

    def check_init(self) -> None:
        """Raise UserError if the run needs an init_from and has none."""
        if self.init_from is not None:
            return
        if self.model.linear == "lora":
            raise UserError("model.linear=lora: trains adapters of a finished model; add init_from=RUN")
        for key in ("init_sha256", "init_tied_matrix"):
            if (value := getattr(self, key)) is not None:
                raise UserError(f"{key}={value}: is for a run with init_from")
