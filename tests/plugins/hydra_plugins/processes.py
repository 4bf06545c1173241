"""A launcher that gives each job of a sweep a process of its own, as Hydra's for joblib and submitit do.

Hydra finds it where tests/plugins is on the path: hydra/launcher=processes
"""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, run_job
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict


class Processes(Launcher):
    def setup(self, **parts: Any) -> None:
        self.parts = parts

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        context, found = multiprocessing.get_context("fork"), []
        for i, overrides in enumerate(job_overrides):
            receiver, sender = context.Pipe()
            process = context.Process(target=self.job, args=(list(overrides), initial_job_idx + i, sender))
            process.start()
            found.append(receiver.recv())
            process.join()
        return found

    def job(self, overrides: list[str], index: int, sender: Any) -> None:
        config = self.parts["hydra_context"].config_loader.load_sweep_config(self.parts["config"], overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = index
        task, context = self.parts["task_function"], self.parts["hydra_context"]
        places = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
        sender.send(run_job(task_function=task, config=config, hydra_context=context, **places))


@dataclass
class Settings:
    _target_: str = "hydra_plugins.processes.Processes"


ConfigStore.instance().store(group="hydra/launcher", name="processes", node=Settings, provider="hydra")
