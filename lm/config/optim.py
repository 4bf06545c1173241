"""The optimizer and the learning-rate schedule."""

from dataclasses import dataclass, field

from lm.config.checks import BadInput, at_least, choose

OPTIMIZERS = ("adamw", "muon")
DECAYS = ("cosine", "linear", "constant")


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    """An optimizer; its learning rate is a linear warm-up times a decay, both pure functions of the step.

    The defaults are those of optim=adamw. The default of train.py is configs/optim/muon.yaml.
    """

    name: str = "adamw"
    lr: float = 3e-3  # of the matrices of the transformer blocks, and of all else where adam_lr is null
    adam_lr: float | None = None  # muon: learning rate of all else; head.*_lr_multiplier multiply it
    momentum: float | None = None  # muon: decay factor of the moving average of the gradients
    ns_steps: int | None = None  # muon: Newton-Schulz steps that orthogonalise the update
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # of the matrices of the transformer blocks; all else has none
    warmup_steps: int = 50
    decay: str = "linear"
    decay_fraction: float = 1.0  # the last fraction of the run, over which the learning rate decays
    final_lr_fraction: float = 0.0  # the learning rate at which the decay ends, as a fraction of lr (or adam_lr)

    def __post_init__(self) -> None:
        choose("optim.name", self.name, OPTIMIZERS)
        choose("optim.decay", self.decay, DECAYS)
        rates = ("lr", "adam_lr", "eps", "weight_decay", "final_lr_fraction")
        at_least(0, "optim.", self, *rates, "warmup_steps", "decay_fraction")
        if self.ns_steps is not None and not 1 <= self.ns_steps <= 7:
            raise BadInput(f"optim.ns_steps={self.ns_steps}: expected 1 to 7")
        for key in ("adam_lr", "momentum", "ns_steps"):
            if (self.name == "muon") != (getattr(self, key) is not None):
                raise BadInput(f"optim.{key}={getattr(self, key)}: expected with optim=muon, and only there")
        if not 0 <= (self.momentum or 0) < 1:
            raise BadInput(f"optim.momentum={self.momentum}: expected from 0 to below 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise BadInput(f"optim.betas={self.betas}: expected two numbers from 0 to below 1")
        if self.decay_fraction > 1:
            raise BadInput(f"optim.decay_fraction={self.decay_fraction}: expected 0 to 1")
