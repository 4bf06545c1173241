"""Schemas of an ablation: a question, arms that differ in one thing, seeds, what counts as an answer, who runs it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm.errors import UserError, expand_paths, require, require_choice, require_min, require_seed

METRICS = {  # name in result.json -> whether less is better, its unit, and what it is called
    "val_loss": (True, "nats per token", "validation loss, nats per token"),
    "val_bpb": (True, "bits per byte", "validation loss, bits per byte"),
    "val_top1": (False, "fraction of tokens", "next-token accuracy on the validation text"),
}
RUN_METRICS = tuple(METRICS)
METRICS |= {"value": (True, "in value", "value"), "higher_value": (False, "in value", "value")}  # of any program's rows
BUDGETS = ("tokens", "flops")
BUDGET_NAMES = {"tokens": "tokens", "flops": "FLOPs", "rows": ""}
HYPERPARAMETERS = ["optim.lr", "head.embedding_lr_multiplier", "head.head_lr_multiplier"]
MATCHED_BY = ("model.d_ff", "model.d_model", "model.n_layers")


def _distinct(key: str, values: Sequence[object]) -> None:
    require(len({*values}) == len(values) > 0, f"{key}={[*values]}", "one or more different values")


@dataclass(slots=True, kw_only=True)
class TuneConfig:
    """The search of each arm's own best settings, on seeds that are not reported."""

    trials: int = 0  # the most settings that an arm tries; 0: nothing is tuned
    seeds: list[int] = field(default_factory=lambda: [1000, 1001])  # of the trials; not those that are reported
    factor: float = 2.0  # between neighbouring values
    hyperparameters: list[str] = field(default_factory=HYPERPARAMETERS.copy)  # those that an arm has are tuned

    def __post_init__(self) -> None:
        require_min(0, "ablation.tune.", self, "trials")
        require(1 < self.factor <= 10, f"ablation.tune.factor={self.factor}", "more than 1, up to 10")
        _distinct("ablation.tune.seeds", self.seeds)
        _distinct("ablation.tune.hyperparameters", self.hyperparameters)
        for seed in self.seeds:
            require_seed(seed, "ablation.tune.seeds")


@dataclass(slots=True, kw_only=True)
class Question:
    """What is asked, whatever the arms are. `name` is the config's file name."""

    seeds: list[int]  # each arm is run at each of them
    baseline: str  # the arm with which the others are compared
    primary: list[str] = field(default_factory=list)  # arms whose comparison answers the question; others: secondary
    baselines: dict[str, str] = field(default_factory=dict)  # arm -> the arm it is compared with, if not the baseline
    equivalence_margin: float  # the smallest difference in `metric` that would change a decision
    contrasts: dict[str, Any] = field(default_factory=dict)  # name -> a weight for each of its arms
    budget: str = "tokens"  # what is held equal: tokens or flops
    looks: list[int] = field(default_factory=list)  # numbers of seeds at which it may stop; empty: once, with all seeds
    name: str  # of the ablation: the file in configs/ablation
    question: str  # what the report answers
    metric: str = "val_loss"  # val_loss, val_bpb or val_top1
    match_parameters: dict[str, str] = field(default_factory=dict)  # arm -> the setting that matches its baseline's
    seed_offsets: dict[str, int] = field(default_factory=dict)  # arm -> added to its seeds, for an A/A control
    tune: TuneConfig = field(default_factory=TuneConfig)


MOST_SEEDS = 1000
NAME = r"[\w.-]{1,40}"  # of an arm, and of an ablation
NAMES = "a name of letters, digits, dots, - and _"


def weighted_sum(weights: Mapping[str, float]) -> str:
    """Weights of arms in words.

    >>> weighted_sum({"a": 1, "b": -0.5, "c": -0.5})
    'a - 0.5 b - 0.5 c'
    """
    sizes = {arm: f"{abs(weight):g} " if abs(weight) != 1 else "" for arm, weight in weights.items()}
    terms = (f"{'-' if weights[arm] < 0 else '+'} {size}{arm}" for arm, size in sizes.items())
    return " ".join(terms).removeprefix("+ ")


@dataclass(slots=True, kw_only=True)
class AblationConfig(Question):
    """One question and its arms. Words in lists are overrides of train.py.

    >>> arms = {"tied": [], "untied": []}
    >>> AblationConfig(name="a", question="?", arms=arms, baseline="tid", seeds=[0], equivalence_margin=0.01)
    Traceback (most recent call last):
    lm.errors.UserError: ablation.baseline=tid: no such arm; choose one of tied, untied
    """

    arms: dict[str, list[str]]  # name -> what is changed
    overrides: list[str] = field(default_factory=list)  # of every arm; {seed} in one is the seed of the run

    def __post_init__(self) -> None:
        require_choice("ablation.metric", self.metric, RUN_METRICS)
        margin, unit = self.equivalence_margin, METRICS[self.metric][1]
        require(0 < margin < math.inf, f"ablation.equivalence_margin={margin}", f"more than 0, in {unit}")
        require_choice("ablation.budget", self.budget, BUDGETS)
        self._check_arms()
        self._check_contrasts()
        self._check_seeds()

    def _check_arms(self) -> None:
        require(len(self.arms) >= 2, f"ablation.arms: has {len(self.arms)}", "two or more")
        names = {f"ablation.arms.{arm}": arm for arm in self.arms} | {f"ablation.name={self.name}": self.name}
        for setting, name in names.items():
            require(bool(re.fullmatch(NAME, name)) and set(name) != {"."}, setting, NAMES)
        baselines = (*self.baselines, *self.baselines.values())
        references = {"primary": self.primary, "match_parameters": self.match_parameters, "baselines": baselines}
        references |= {"baseline": [self.baseline], "seed_offsets": self.seed_offsets}
        for key, names_of_arms in references.items():
            for name in sorted({*names_of_arms} - self.arms.keys()):
                raise UserError(f"ablation.{key}={name}: no such arm; choose one of {', '.join(self.arms)}")
        pairs = self.pairs()
        for arm in self.arms:
            if arm in self.primary and arm not in pairs:
                raise UserError(f"ablation.primary: {arm} is compared with no other arm")
            if self.baselines.get(arm) == arm:
                raise UserError(f"ablation.baselines: {arm} is compared with itself")
            self.root(arm)
        for arm, key in self.match_parameters.items():
            require_choice(f"ablation.match_parameters.{arm}", key, MATCHED_BY)
            if arm not in pairs or pairs[arm] in self.match_parameters:
                raise UserError(f"ablation.match_parameters: {arm} needs an arm to match that is itself not matched")

    def _check_contrasts(self) -> None:
        shapes = dict[tuple[tuple[str, float], ...], str]()
        for name, weights in self.contrasts.items():
            setting = f"ablation.contrasts.{name}"
            require(bool(re.fullmatch(NAME, name)) and name not in self.arms, setting, f"{NAMES}, that of no arm")
            numbers = [*weights.values()] if isinstance(weights, dict) else []
            are_weights = len(numbers) > 1 and all(type(n) in (int, float) and 0 < abs(n) < math.inf for n in numbers)
            is_contrast = are_weights and abs(math.fsum(numbers)) < 1e-9 * max(map(abs, numbers))
            require(is_contrast, f"{setting}={weights}", "two arms or more with weights other than 0, whose sum is 0")
            for arm in weights:
                require_choice(setting, arm, tuple(self.arms))
            shape = tuple((arm, round(weights[arm] / weights[min(weights)], 9)) for arm in sorted(weights))
            require(shape not in shapes, f"{setting}={weights}", f"another sum than that of {shapes.get(shape)}")
            shapes[shape] = name

    def _check_seeds(self) -> None:
        require(len(self.seeds) <= MOST_SEEDS, "ablation.seeds: too many", f"at most {MOST_SEEDS:,}")
        _distinct("ablation.seeds", self.seeds)
        for seed in self.seeds:
            require_seed(seed, "ablation.seeds")
        looks, n = self.looks, len(self.seeds)
        is_plan = not looks or (looks == sorted({*looks}) and looks[0] >= 2 and looks[-1] == n)
        expected = f"increasing numbers of seeds from 2 on, of which the last is all, {n}"
        require(is_plan, f"ablation.looks={looks}", expected)
        for arm, offset in (dict.fromkeys(self.arms, 0) | self.seed_offsets).items():
            own = {seed + offset for seed in self.seeds}
            is_other = arm not in self.seed_offsets or (offset >= 1 and own.isdisjoint(self.seeds))
            require(is_other, f"ablation.seed_offsets.{arm}={offset}", "a number that leads to other seeds")
            if self.tune.trials and (both := own & {*self.tune.seeds}):
                raise UserError(f"ablation.tune.seeds: {min(both)} is also reported for {arm}; tune on other seeds")

    def seeds_of(self, arm: str) -> list[int]:
        """Return the seeds with which an arm is trained: those that are reported, then those of tuning."""
        offset = self.seed_offsets.get(arm, 0)
        return [*(seed + offset for seed in self.seeds), *(self.tune.seeds if self.tune.trials else ())]

    def pairs(self) -> dict[str, str]:
        """Which arm is compared with which."""
        return {arm: other for arm in self.arms if (other := self.baselines.get(arm, self.baseline)) != arm}

    def root(self, arm: str) -> str:
        """The arm at the end of the chain of baselines; its budget is that of every arm in the chain."""
        seen, pairs = [arm], self.pairs()
        while (other := pairs.get(seen[-1])) is not None:
            if other in seen:
                raise UserError(f"ablation.baselines: {' with '.join([*seen, other])} never ends")
            seen.append(other)
        return seen[-1]


SEED = "{seed}"  # in an override: the seed of the run
EXIT_CODES = ("done", "verdict")
RECORD = "ablation.json"  # in the folder of an ablation
FROM_RUN = {"job_name", "time", "cpus_per_task", "gpus_per_node", "ntasks_per_node"}  # of sbatch: each run decides them


@dataclass(slots=True, kw_only=True)
class RayConfig:
    address: str = "auto"  # of the cluster; auto: the one that this machine belongs to


@dataclass(slots=True, kw_only=True)
class SlurmConfig:
    """What sbatch is asked for by each run. Cores and GPUs follow from the run: its threads and its device."""

    partition: str | None = None  # null: the cluster's default
    minutes: int = 60  # of a run; one that takes longer is queued again, from its last checkpoint, up to three times
    memory_gb: float | None = None  # null: the cluster's default
    parameters: dict[str, Any] = field(default_factory=dict)  # further ones, as submitit names them: {qos: long}

    def __post_init__(self) -> None:
        require_min(1, "slurm.", self, "minutes")
        require(self.memory_gb is None or self.memory_gb > 0, f"slurm.memory_gb={self.memory_gb}", "more than 0")
        keys = [*self.parameters, *(self.parameters.get("additional_parameters") or ())]
        for key in FROM_RUN & {key.replace("-", "_") for key in keys}:
            raise UserError(f"slurm.parameters.{key}: expected no such key; the run and slurm.minutes decide it")


@dataclass(slots=True, kw_only=True)
class AblateConfig:
    """The command line of ablate.py."""

    ablation: AblationConfig
    output_dir: str | None = None  # null: ablations/, under the ablation's name
    confirm: str | None = None  # folder of a finished ablation, whose primary arms are asked again on fresh seeds
    plan_only: bool = False  # show what would be run, and run nothing
    report: bool = True  # write the pages, tables and figures of the answer, which takes some seconds
    json: bool = False  # print one JSON object with the verdicts, and nothing else, on standard output
    exit_code: str = "done"  # of what: done, or the verdict (better 0, worse 10, equivalent 11, undecided 12)
    executor: str = "local"  # what carries out the runs: local, ray or slurm
    ray: RayConfig = field(default_factory=RayConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    workers: int | None = None  # runs at a time; null: one for each GPU, else for each core; 64 jobs on Slurm
    overrides: list[str] = field(default_factory=list)  # of train.py, for every arm

    def __post_init__(self) -> None:
        expand_paths("", self, "output_dir", "confirm")
        require_min(1, "", self, "workers")
        require_choice("executor", self.executor, ("local", "ray", "slurm"))
        require_choice("exit_code", self.exit_code, EXIT_CODES)


@dataclass(slots=True, kw_only=True)
class ReportConfig:
    """The command line of report.py: one of the first three; output_dir beside rows is where their report goes."""

    output_dir: str | None = None  # of an ablation
    run_dir: str | None = None  # of a single run
    rows: str | None = None  # a CSV file of any program with the columns arm, seed and value, to be judged
    baseline: str | None = None  # of rows: the arm that the others are compared with; null: of two arms the first
    margin: float | None = None  # of rows: the equivalence margin, in their unit; null: nothing is called equivalent
    higher: bool = False  # of rows: higher is better
    json: bool = False  # of an ablation or rows: print one JSON object with the verdicts, and nothing else
    exit_code: str = "done"  # of what: done, or the verdict (better 0, worse 10, equivalent 11, undecided 12)

    def __post_init__(self) -> None:
        expand_paths("", self, "output_dir", "run_dir", "rows")
        require_choice("exit_code", self.exit_code, EXIT_CODES)
        place = None if self.rows else self.output_dir  # else of the report
        if sum(value is not None for value in (place, self.run_dir, self.rows)) != 1:
            ways = "output_dir=DIR of an ablation, run_dir=RUN or rows=FILE.csv"
            raise UserError(f"output_dir: give {ways}, one of them")
        require(not (self.run_dir and self.json), "json=true", "no such key: the page of a run has no verdict")
        is_judged = self.rows is not None or self.output_dir is not None
        require(is_judged or self.exit_code == "done", f"exit_code={self.exit_code}", "output_dir=DIR or rows=FILE.csv")
        for key in ("baseline", "margin", "higher"):
            require(self.rows is not None or not getattr(self, key), f"{key}={getattr(self, key)}", "rows=FILE.csv too")
