"""Schemas of the engines that carry out the runs of an ablation."""

from dataclasses import dataclass, field
from typing import Any

from lm.config.checks import BadInput, at_least, expect

EXECUTORS = ("local", "ray", "slurm")
FROM_RUN = {"job_name", "time", "cpus_per_task", "gpus_per_node", "ntasks_per_node"}  # of sbatch: each run decides them


@dataclass(slots=True, kw_only=True)
class RayConfig:
    address: str = "auto"  # of the cluster; auto: the one that this machine belongs to


@dataclass(slots=True, kw_only=True)
class SlurmConfig:
    """What sbatch is asked for by each run. Cores and GPUs follow from the run: its threads and its device."""

    partition: str | None = None  # null: the cluster's default
    minutes: int = 60  # of a run; one that takes longer is queued again, from its last checkpoint, up to three times
    memory_gb: float | None = None  # null: the cluster's default
    parameters: dict[str, Any] = field(default_factory=dict)  # further ones, as submitit names them: {qos: long}

    def __post_init__(self) -> None:
        at_least(1, "slurm.", self, "minutes")
        if self.memory_gb is not None and self.memory_gb <= 0:
            raise BadInput(f"slurm.memory_gb={self.memory_gb}: expected more than 0")
        further = self.parameters.get("additional_parameters") or {}
        expect(isinstance(further, dict), f"slurm.parameters.additional_parameters={further}", "names and values")
        names = {"": self.parameters, "additional_parameters.": further}
        for where, key in ((where, key) for where, given in names.items() for key in given):
            if key.replace("-", "_") in FROM_RUN:
                expected = "slurm.minutes" if key == "time" else "no such key: the run decides it"
                raise BadInput(f"slurm.parameters.{where}{key}: expected {expected}")
