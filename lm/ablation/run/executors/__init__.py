"""Engines that carry out runs: processes of this machine, Ray, Slurm. Each is one class behind one seam.

In: Task objects. Out: run directories, and when each task ended.
"""

from lm.ablation.run.executors.executor import Executor
from lm.ablation.run.executors.local import LocalExecutor
from lm.ablation.run.executors.ray import RayExecutor
from lm.ablation.run.executors.slurm import SlurmExecutor

EXECUTORS: dict[str, type[Executor]] = {"local": LocalExecutor, "ray": RayExecutor, "slurm": SlurmExecutor}
