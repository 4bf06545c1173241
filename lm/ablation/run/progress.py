"""The whole ablation as one bar, and a line for each run that ends."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from lm.ablation.plan.cells import Cell
from lm.ablation.run_files import Outcome, RunFiles
from lm.system.terminal import duration as spell


class Progress:
    """How much is done, in seconds of expected work, and how long the rest will take at the speed so far."""

    def __init__(self, name: str, metric: str, folder: Path, workers: int, cost: Callable[[Cell], float]) -> None:
        self.name, self.metric, self.folder, self.workers, self.cost = name, metric, folder, workers, cost
        self.ahead: dict[str, Cell] = {}  # by run_dir
        self.expected: list[float] = []  # costs of trials that are not yet known
        self.done: list[float] = []
        self.started = time.perf_counter()
        form = "{desc} |{bar}| {percentage:3.0f}%{postfix}"
        self.bar = tqdm(total=1.0, desc=name, bar_format=form, leave=False, disable=not sys.stderr.isatty())

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.bar.close()
        if error is not None:
            print(f"{self.name}: {self.ended()} runs ended; the same command goes on from here", file=sys.stderr)

    def expect(self, cells: list[Cell], trials: list[Cell]) -> None:
        """Work that is to come: reported cells, and as many trials as there will at least be."""
        self.ahead = {one.run_dir: one for one in cells}
        self.expected = list(map(self.cost, trials))

    def say(self, line: str) -> None:
        tqdm.write(f"{self.name}: {line}", file=sys.stderr)

    def begin(self, cells: list[Cell], trials: bool) -> None:
        """These start now. Trials were expected in number only, and may be more."""
        self.ahead |= {one.run_dir: one for one in cells}
        del self.expected[: len(cells) * trials]

    def tick(self, steps: dict[str, int], ended: list[str]) -> None:
        """Called with the steps that the running cells have made, and the cells that have ended since."""
        for run_dir in ended:
            cell = self.ahead.pop(run_dir)
            self.done.append(self.cost(cell))
            tqdm.write(self.line(cell), file=sys.stderr)
        done, left = self.seconds(steps)
        self.bar.n = min(1.0, done / max(done + left, 1e-9))
        self.bar.set_description(f"{self.name}: {self.ended()} runs", refresh=False)
        self.bar.set_postfix_str(f" {self.left(steps)}", refresh=False)
        self.bar.refresh()

    def ended(self) -> str:
        return f"{len(self.done)} of {len(self.done) + len(self.ahead) + len(self.expected)}"

    def seconds(self, steps: dict[str, int]) -> tuple[float, float]:
        """Of work that is done and that is left, when the running cells have made so many steps."""
        begun = sum(self.cost(self.ahead[run_dir]) * n / self.ahead[run_dir].steps for run_dir, n in steps.items())
        return sum(self.done) + begun, sum(map(self.cost, self.ahead.values())) + sum(self.expected) - begun

    def left(self, steps: dict[str, int]) -> str:
        done, left = self.seconds(steps)
        elapsed = time.perf_counter() - self.started
        return f"{spell(left / (done / elapsed if done > 0.02 * (done + left) else self.workers))} left"

    def line(self, cell: Cell) -> str:
        try:
            found = RunFiles(self.folder / cell.run_dir).read()
        except OSError as error:  # a line about a run must not end the others
            found = Outcome("unknown", str(error))
        said = found.status + (f" ({found.error})" if found.error else "")
        if found.result:
            said = f"{self.metric} {found.result[self.metric]:.4f}"
        values = " ".join(f"{setting}={value:g}" for setting, value in cell.tuned.items())
        who = f"trial of {cell.arm} at {values}," if cell.run_dir.startswith("trials/") else cell.arm
        return f"{self.ended()}  {who} seed {cell.seed}: {said}; {self.left({})}"
