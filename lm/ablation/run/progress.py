"""The whole ablation as one bar, and a line for each run that ends."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from lm.ablation.duration import spell
from lm.ablation.outcomes import Outcome, RunFiles
from lm.ablation.plan.cells import Cell


class Progress:
    """How much is done, in seconds of expected work, and how long the rest will take at the speed so far."""

    def __init__(self, name: str, metric: str, folder: Path, workers: int, cost: Callable[[Cell], float]) -> None:
        self.name, self.metric, self.folder, self.workers, self.cost = name, metric, folder, workers, cost
        self.total = self.done = self.expected = 0.0  # expected: trials that are not yet known
        self.n_total = self.n_done = self.n_expected = 0
        self.started = time.perf_counter()
        self.bar: tqdm[Any] | None = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            form = "{desc} |{bar}| {percentage:3.0f}%{postfix}"
            self.bar = tqdm(total=1.0, desc=self.name, bar_format=form, leave=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
        if error is not None:
            print(f"{self.name}: {self.ended()} runs ended; the same command goes on from here", file=sys.stderr)

    def expect(self, cells: list[Cell], trials: list[Cell]) -> None:
        """Work that is to come: reported cells, and as many trials as there will at least be."""
        self.expected = sum(map(self.cost, trials))
        self.total = sum(map(self.cost, cells)) + self.expected
        self.n_expected = len(trials)
        self.n_total = len(cells) + len(trials)

    def begin(self, cells: list[Cell], trials: bool) -> None:
        """These start now. Trials were expected in number only, and may be more."""
        self.cells = {one.run_dir: one for one in cells}
        if trials:
            cost = sum(map(self.cost, cells))
            self.total += max(0.0, cost - self.expected)
            self.expected = max(0.0, self.expected - cost)
            self.n_total += max(0, len(cells) - self.n_expected)
            self.n_expected = max(0, self.n_expected - len(cells))

    def tick(self, steps: dict[str, int], ended: list[str]) -> None:
        """Called with the steps that the running cells have made, and the cells that have ended since."""
        for run_dir in ended:
            self.done += self.cost(self.cells[run_dir])
            self.n_done += 1
            tqdm.write(self.line(self.cells[run_dir]), file=sys.stderr)
        if self.bar is not None:
            self.bar.n = min(1.0, self.so_far(steps) / max(self.total, 1e-9))
            self.bar.set_description(f"{self.name}: {self.ended()} runs", refresh=False)
            self.bar.set_postfix_str(f" {self.left(steps)}", refresh=False)
            self.bar.refresh()

    def ended(self) -> str:
        return f"{self.n_done} of {max(self.n_total, self.n_done)}"

    def so_far(self, steps: dict[str, int]) -> float:
        parts = [self.cost(self.cells[run_dir]) * n / self.cells[run_dir].steps for run_dir, n in steps.items()]
        return self.done + sum(parts)

    def left(self, steps: dict[str, int]) -> str:
        done, elapsed = self.so_far(steps), time.perf_counter() - self.started
        speed = done / elapsed if done > 0.02 * self.total else self.workers
        return f"{spell(max(0.0, self.total - done) / speed)} left"

    def line(self, cell: Cell) -> str:
        found = RunFiles(self.folder / cell.run_dir).read() or Outcome("missing")
        said = found.status + (f" ({found.error})" if found.error else "")
        if found.result:
            said = f"{self.metric} {found.result[self.metric]:.4f}"
        values = " ".join(f"{setting}={value:g}" for setting, value in cell.tuned.items())
        who = f"trial of {cell.arm} at {values}," if cell.run_dir.startswith("trials/") else cell.arm
        return f"{self.ended()}  {who} seed {cell.seed}: {said}; {self.left({})}"
