"""The optimizer and the learning-rate schedule."""

from dataclasses import dataclass, field

from lm.config.checks import refuse, require, require_choice, require_min, together

OPTIMIZERS = ("adamw", "muon")
DECAYS = ("cosine", "linear", "constant")


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

    @together()
    def __post_init__(self) -> None:
        require_choice("optim.name", self.name, OPTIMIZERS)
        require_choice("optim.decay", self.decay, DECAYS)
        rates = ("lr", "adam_lr", "eps", "weight_decay", "final_lr_fraction")
        require_min(0, "optim.", self, *rates, "warmup_steps", "decay_fraction")
        require(self.ns_steps is None or 1 <= self.ns_steps <= 7, f"optim.ns_steps={self.ns_steps}", "1 to 7")
        for key in ("adam_lr", "momentum", "ns_steps"):
            if (self.name == "muon") != (getattr(self, key) is not None):
                refuse(f"optim.{key}={getattr(self, key)}: expected with optim=muon, and only there")
        require(0 <= (self.momentum or 0) < 1, f"optim.momentum={self.momentum}", "from 0 to below 1")
        are_factors = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(are_factors, f"optim.betas={self.betas}", "two numbers from 0 to below 1")
        require(
            self.ema is None or 0 < self.ema < 1, f"optim.ema={self.ema}", "between 0 and 1, or null for no average"
        )
        require(self.decay_fraction <= 1, f"optim.decay_fraction={self.decay_fraction}", "0 to 1")
