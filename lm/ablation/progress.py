"""The whole ablation as one bar, which counts the expected seconds of runs, and a line for each run that ends."""

import sys
from collections.abc import Sequence

from tqdm import tqdm

from lm.ablation.plan import Plan, RunSpec

BAR = "{desc} |{bar}| {percentage:3.0f}% {elapsed}<{remaining}"


class Progress:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.running = plan, dict[str, RunSpec]()  # by run_dir
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
        tqdm.write(f"{self.plan.config.name}: {line}", file=sys.stderr)

    def begin(self, specs: Sequence[RunSpec]) -> None:
        """These are made next. What else is to come is known better each time."""
        ahead = self.plan.expected()
        self.running = {spec.run_dir: spec for spec in specs}
        self.n_runs, self.total = self.n_ended + len(ahead), self.done + sum(map(self.plan.seconds, ahead))

    def update(self, steps: dict[str, int], ended: list[str]) -> None:
        """Takes the steps that the running ones have made, and the runs that have ended since the last call."""
        for spec in map(self.running.pop, ended):
            self.n_ended += 1
            self.done += self.plan.seconds(spec)
            tqdm.write(f"{self.n_ended} of {self.n_runs}  {self._describe(spec)}", file=sys.stderr)
        begun = [(self.running[run_dir], n) for run_dir, n in steps.items()]
        done = self.done + sum(self.plan.seconds(spec) * n / spec.steps for spec, n in begun)
        self.bar.total, self.bar.n = self.total, min(done, self.total)
        self.bar.set_description_str(f"{self.plan.config.name}: {self.n_ended} of {self.n_runs} runs", refresh=False)
        self.bar.refresh()

    def _describe(self, spec: RunSpec) -> str:
        outcome, metric = self.plan.reader.outcome(spec.run_dir), self.plan.config.metric
        score = f"{metric} {outcome.result[metric]:.4f}" if outcome.result else outcome.status
        values = " ".join(f"{setting}={value:g}" for setting, value in spec.tuned.items())
        arm = f"trial of {spec.arm} at {values}" if spec.is_trial else spec.arm
        return f"{arm}, seed {spec.seed}: {score}{f' ({outcome.error})' if outcome.error else ''}"
