"""The whole ablation as one bar, and a line for each run that ends."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tqdm import tqdm

from lm.ablation.plan import RunSpec
from lm.ablation.run_files import Outcome, RunFiles

BAR = "{desc} |{bar}| {percentage:3.0f}% {elapsed}<{remaining}"


class Progress:
    """A bar that counts the expected seconds of runs, of which `cost` knows those of one."""

    def __init__(self, name: str, metric: str, folder: Path, cost: Callable[[RunSpec], float]) -> None:
        self.name, self.metric, self.folder, self.cost = name, metric, folder, cost
        self.begun: dict[str, RunSpec] = {}  # by run_dir
        self.n_ended = self.n_runs = 0
        self.done = self.total = 0.0  # seconds
        self.bar = tqdm(total=1.0, bar_format=BAR, leave=False, disable=not sys.stderr.isatty())

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.bar.close()
        if error is not None:
            self.say(f"{self.n_ended} of {self.n_runs} runs ended; the same command goes on from here")

    def say(self, line: str) -> None:
        tqdm.write(f"{self.name}: {line}", file=sys.stderr)

    def begin(self, specs: Iterable[RunSpec], ahead: Iterable[RunSpec]) -> None:
        """`specs` are made next; `ahead` has all that are still to come, these too, as far as they are known now."""
        self.begun = {spec.run_dir: spec for spec in specs}
        costs = [self.cost(spec) for spec in ahead]
        self.n_runs, self.total = self.n_ended + len(costs), self.done + sum(costs)

    def update(self, steps: dict[str, int], ended: list[str]) -> None:
        """Takes the steps that the running ones have made, and the runs that have ended since the last call."""
        for run_dir in ended:
            spec = self.begun.pop(run_dir)
            self.n_ended += 1
            self.done += self.cost(spec)
            tqdm.write(f"{self.n_ended} of {self.n_runs}  {self._describe(spec)}", file=sys.stderr)
        partial = sum(self.cost(self.begun[run_dir]) * n / self.begun[run_dir].steps for run_dir, n in steps.items())
        self.bar.total, self.bar.n = self.total, min(self.done + partial, self.total)
        self.bar.set_description_str(f"{self.name}: {self.n_ended} of {self.n_runs} runs", refresh=False)
        self.bar.refresh()

    def _describe(self, spec: RunSpec) -> str:
        try:
            outcome = RunFiles(self.folder / spec.run_dir).read()
        except OSError as error:  # a line about a run must not end the others
            outcome = Outcome("unknown", str(error))
        score = f"{self.metric} {outcome.result[self.metric]:.4f}" if outcome.result else outcome.status
        values = " ".join(f"{setting}={value:g}" for setting, value in spec.tuned.items())
        arm = f"trial of {spec.arm} at {values}" if spec.is_trial else spec.arm
        return f"{arm}, seed {spec.seed}: {score}{f' ({outcome.error})' if outcome.error else ''}"
