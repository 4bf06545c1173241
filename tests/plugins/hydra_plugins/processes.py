"""A launcher that gives each job of a sweep a process of its own, as Hydra's for joblib and submitit do.

Hydra finds it where tests/plugins is on the path: hydra/launcher=processes
"""

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn


class Processes(BasicLauncher):
    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        context, returned = multiprocessing.get_context("fork"), []
        for i, overrides in enumerate(job_overrides):
            receiver, sender = context.Pipe()
            process = context.Process(target=self.job, args=(overrides, initial_job_idx + i, sender))
            process.start()
            returned.append(receiver.recv())
            process.join()
        return returned

    def job(self, overrides: Sequence[str], index: int, sender: Any) -> None:
        sender.send(super().launch([overrides], index)[0])


@dataclass
class Settings:
    _target_: str = "hydra_plugins.processes.Processes"


ConfigStore.instance().store(group="hydra/launcher", name="processes", node=Settings, provider="hydra")
