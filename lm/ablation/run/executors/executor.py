"""The seam between the loop that carries out runs and the engine that they run on."""

import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from lm.ablation.run.task import TOKEN, Place, Task
from lm.config import UserError
from lm.config.ablation import AblateConfig


class Executor(ABC):
    """Where tasks run. An engine never runs two tasks of one name at a time, whoever has started them."""

    kind: str
    package: str | None = None  # that the engine needs
    remote = True  # runs may be on other machines, so the ablation's folder must be on storage that all of them share
    retries = 2  # further tries of a task whose process ended without a word: its node was lost, or it was killed

    def __init__(self, config: AblateConfig, folder: Path) -> None:
        if self.package and importlib.util.find_spec(self.package) is None:
            extra = f'install it with `pip install "lm-lab[{self.kind}]"`'
            raise UserError(f"executor={self.kind}: the package {self.package} is missing; {extra}")
        self.config, self.folder = config, folder

    @cached_property
    def prefix(self) -> str:
        """Of all names of this folder. One that was deleted and made again has another token, hence other names."""
        token = self.folder / TOKEN
        this = f"{self.folder.resolve()} {token.read_text() if token.exists() else ''}"
        return f"lm-{hashlib.sha256(this.encode()).hexdigest()[:8]}-"

    def name(self, task: Task) -> str:
        """Of a task in the engine: the same in every call of the command, and another in every other folder."""
        return self.prefix + task.run_dir.replace("/", "-")

    def prepare(self, place: Place | None) -> None:  # noqa: B027
        """Called once before the first start. Raises UserError if a node is known to lack what runs need there."""

    @abstractmethod
    def slots(self, threads: int) -> int:
        """How many tasks of so many threads to hand over at a time, if the user does not say."""

    def adopt(self, tasks: Iterable[Task]) -> list[Task]:
        """Those of the tasks that an earlier driver has left queued or running. From now on they are ours."""
        return []

    @abstractmethod
    def start(self, task: Task) -> None: ...

    @abstractmethod
    def poll(self) -> dict[str, str]:
        """Wait a moment; the run_dirs of tasks that have ended since the last call, and what ended each process.

        Raises UserError if one ended because its node lacks what it needs.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End what is queued or running. A run that the engine lets save a checkpoint has a minute for it."""
