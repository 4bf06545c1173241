"""Make runs, several at a time, on an executor, and show how far they are."""

import logging
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from tqdm import tqdm

from lm.ablation.executors import Executor
from lm.ablation.plan import Plan, RunSpec
from lm.ablation.run_files import Ending, Failure
from lm.config import UserError

BAR = "{desc} |{bar}| {percentage:3.0f}% {elapsed}<{remaining}"
MAX_TRIES = 2  # of a run whose process was killed: an arm must not lose a seed by an accident
OnProgress = Callable[[dict[str, int], list[str]], None]
log = logging.getLogger(__name__)


def execute(specs: Sequence[RunSpec], executor: Executor, workers: int, on_progress: OnProgress) -> None:
    """Make these runs, `workers` at a time, until each has finished, failed or diverged.

    `on_progress` is called about twice a second with the steps that the running ones have made and those that have
    ended since, both by run_dir. An interrupt cancels what is queued or running and goes on to the caller. Raises
    UserError if the executor takes no run at all, or if a machine lacks what runs need.
    """
    waiting, running, tries = deque(specs), dict[str, RunSpec](), Counter[str]()
    refused = warned = False
    try:
        while waiting or running:
            while waiting and len(running) < workers and not refused:
                spec = waiting[0]
                try:
                    _submit(spec, executor)
                except UserError as error:  # it takes no more now, as at a limit of queued jobs
                    if not running:
                        raise
                    if not warned:
                        log.warning("%s: %s; it is tried again when another run has ended", spec.run_dir, error)
                    refused = warned = True
                else:
                    running[spec.run_dir] = waiting.popleft()
            ended = []
            for name, ending in executor.poll().items():
                spec, refused = running.pop(name), False
                tries[name] += 1
                if _has_outcome(spec, ending, executor.name, may_retry=tries[name] < MAX_TRIES):
                    ended.append(name)
                else:
                    waiting.append(spec)
            on_progress({name: _steps(spec) for name, spec in running.items()}, ended)
    except BaseException:
        executor.cancel()
        raise


def _submit(spec: RunSpec, executor: Executor) -> None:
    spec.files.run_dir.parent.mkdir(parents=True, exist_ok=True)
    spec.files.status.unlink(missing_ok=True)
    spec.files.where.unlink(missing_ok=True)
    executor.submit(spec)


def _has_outcome(spec: RunSpec, ending: Ending, executor: str, may_retry: bool) -> bool:
    """Whether the run need not be tried again. Its status is written where its process could not."""
    if spec.files.read().status != "missing":
        return True
    if executor != "local" and ending.kind != Failure.KILLED and not spec.files.where.exists():
        expected = "expected lm, Python and output_dir on all nodes as on this machine"
        raise UserError(f"executor={executor}: {spec.run_dir} could not begin ({ending.message}); {expected}")
    if ending.kind != Failure.ERROR and may_retry:
        log.info("%s: %s; it is started again", spec.run_dir, ending.message)
        return False
    spec.files.write_status("failed", ending.kind or Failure.ERROR, ending.message)
    return True


def _steps(spec: RunSpec) -> int:
    with suppress(OSError):  # it is only for a bar
        return spec.files.steps()
    return 0


class Progress:
    """One bar, which counts the expected seconds of all runs, and a line for each run that ends."""

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
