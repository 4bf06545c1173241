"""The whole ablation as one bar, and a line for each run that ends."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from lm.ablation.plan.cells import Cell
from lm.ablation.run.workers import Place


class Progress:
    """How much is done, in seconds of expected work, and how long the rest will take at the speed so far."""

    def __init__(self, name: str, metric: str, workers: int, cost: Callable[[Cell], float]) -> None:
        self.name, self.metric, self.workers, self.cost = name, metric, workers, cost
        self.total = self.done = self.spare = 0.0  # spare: trials that are expected but not yet known
        self.n_total = self.n_done = self.n_spare = 0
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
            place = f"{self.n_done} of {max(self.n_total, self.n_done)} runs ended"
            print(f"{self.name}: {place}; the same command goes on from here", file=sys.stderr)

    def expect(self, cells: list[Cell], trials: list[Cell]) -> None:
        """Work that is to come: reported cells, and as many trials as there will at least be."""
        self.spare = sum(map(self.cost, trials))
        self.total = sum(map(self.cost, cells)) + self.spare
        self.n_spare = len(trials)
        self.n_total = len(cells) + len(trials)

    def begin(self, cells: list[Cell], folder: Path, trials: bool) -> None:
        """These start now. Trials were expected in number only, and may be more."""
        self.cells, self.folder = {one.name: one for one in cells}, folder
        if trials:
            cost = sum(map(self.cost, cells))
            self.total += max(0.0, cost - self.spare)
            self.spare = max(0.0, self.spare - cost)
            self.n_total += max(0, len(cells) - self.n_spare)
            self.n_spare = max(0, self.n_spare - len(cells))

    def tick(self, steps: dict[str, int], ended: list[str]) -> None:
        """Called with the steps that the running cells have made, and the cells that have ended since."""
        for name in ended:
            self.done += self.cost(self.cells[name])
            self.n_done += 1
            tqdm.write(self.line(self.cells[name]), file=sys.stderr)
        if self.bar is not None:
            self.bar.n = min(1.0, self.so_far(steps) / max(self.total, 1e-9))
            self.bar.set_description(
                f"{self.name}: {self.n_done} of {max(self.n_total, self.n_done)} runs", refresh=False
            )
            self.bar.set_postfix_str(f" {self.left(steps)}", refresh=False)
            self.bar.refresh()

    def so_far(self, steps: dict[str, int]) -> float:
        parts = (
            self.cost(self.cells[name]) * n / self.cells[name].run.trainer["max_steps"] for name, n in steps.items()
        )
        return self.done + sum(parts)

    def left(self, steps: dict[str, int]) -> str:
        done, elapsed = self.so_far(steps), time.perf_counter() - self.started
        speed = done / elapsed if done > 0.02 * self.total else self.workers
        return f"{spell(max(0.0, self.total - done) / speed)} left"

    def line(self, cell: Cell) -> str:
        what = Place(self.folder / cell.name).status()
        said = what["status"] + (f" ({what['error']})" if "error" in what else "")
        if "result" in what:
            said = f"{self.metric} {what['result'][self.metric]:.4f}"
        place = f"{self.n_done} of {max(self.n_total, self.n_done)}"
        values = " ".join(f"{setting}={value:g}" for setting, value in cell.tuned.items())
        who = f"trial of {cell.arm} at {values}," if self.folder.name == "trials" else cell.arm
        return f"{place}  {who} seed {cell.seed}: {said}; {self.left({})}"


def spell(seconds: float) -> str:
    """A length of time as a person would say it.

    >>> spell(40), spell(400), spell(40000)
    ('40 s', '7 min', '11.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
