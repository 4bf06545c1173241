"""The schema of a question, and the settings of the commands `ablate` and `report`. Imports nothing heavy."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lm.errors import UserError, check_settings, check_unused, expand_paths, require, require_choice


class Metric(NamedTuple):
    """A score by which arms are compared."""

    sign: int  # 1 if lower is better, -1 if higher is better
    unit: str
    words: str  # for pages


METRICS = {
    "val_loss": Metric(1, "nats per token", "validation loss, nats per token"),
    "val_bpb": Metric(1, "bits per byte", "validation loss, bits per byte"),
    "val_top1": Metric(-1, "fraction of tokens", "next-token accuracy on the validation text"),
    "value": Metric(1, "in value", "value"),  # of the rows of any program
    "higher_value": Metric(-1, "in value", "value"),
}
RUN_METRICS = ("val_loss", "val_bpb", "val_top1")
BUDGETS = {"tokens": "tokens", "flops": "FLOPs"}
MATCHED_BY = ("model.d_ff", "model.d_model", "model.n_layers")
EQUAL_COST = 0.02  # budgets, and FLOPs of a token, that differ by less count as equal
LEARNING_RATE = "learning_rate"
TUNED_SETTING = {LEARNING_RATE: "optim.lr_scale"}  # one factor for the peaks of all parameter groups
MIN_SEEDS = 3  # below, there is no verdict
MOST_SEEDS = 1000
LONGEST = 40  # characters of a name
NAME = rf"[^\W_][\w.-]{{0,{LONGEST - 1}}}"  # of an arm, and of an ablation; matplotlib leaves _x out of a legend
NAMES = f"a name of at most {LONGEST} letters, digits, dots, - and _ that begins with a letter or digit"
SEED = "{seed}"  # in init_from: the seed of the run
AGAIN = "Confirmation on fresh seeds: "  # begins the question of a confirmation


@dataclass(slots=True, kw_only=True)
class Question:
    """One question: arms that differ in one thing, seeds that pair them, and the smallest difference that matters.

    Words in lists are overrides of train.

    >>> arms = {"tied": [], "untied": []}
    >>> Question(name="a", question="?", arms=arms, baseline="tid", seeds=[0])
    Traceback (most recent call last):
    lm.errors.UserError: ablation.baseline=tid: no such arm; choose one of tied, untied
    """

    name: str  # name of the ablation; for a question in a file, the name of the file
    question: str  # question that the report answers
    arms: dict[str, Any]  # settings that each arm changes, by the name of the arm
    overrides: Any = field(default_factory=list)  # settings of all arms; {seed} in init_from: seed of the run
    baseline: str  # arm with which the other arms are compared
    baselines: dict[str, str] = field(default_factory=dict)  # arm -> another baseline for this arm
    primary: list[str] = field(default_factory=list)  # arms whose comparison answers the question; empty: all
    contrasts: dict[str, Any] = field(default_factory=dict)  # weighted sums of arms: name -> arm -> weight
    seeds: Any  # seeds at which each arm is trained: a list, or their number (5 means the seeds 0 to 4)
    seed_offsets: dict[str, int] = field(default_factory=dict)  # arm -> number added to its seeds, for an A/A control
    folds: Any = True  # whether each pair holds out another part of the text: true or false
    first_fold: float = 0.0  # number of the part that the first pair holds out, from 0; 0.5: all cuts half a part later
    metric: str = "val_loss"  # score that is compared: val_loss, val_bpb or val_top1
    equivalence_margin: float | None = None  # smallest difference that matters; null: 1 % of perplexity
    budget: str = "tokens"  # what is equal for all arms: training tokens or training flops
    match_parameters: dict[str, str] = field(default_factory=dict)  # arm -> setting that matches its baseline's size
    tune: str | None = None  # tuned setting: learning_rate (also: true), or a setting of train that is a number
    looks: list[int] = field(default_factory=list)  # numbers of seeds at which the ablation may stop early; empty: none

    def __post_init__(self) -> None:
        self.arms = {arm: _words(f"arms.{arm}", words) for arm, words in self.arms.items()}
        self.overrides = _words("overrides", self.overrides)
        self.seeds = _seeds(self.seeds)
        parts = "true or false; data.val_fraction=0.2 makes five parts of the text"
        require(isinstance(self.folds, bool), f"ablation.folds={self.folds}", parts)
        self.tune = {"true": LEARNING_RATE, "false": None}.get(str(self.tune).lower(), self.tune)
        names = METRICS if self.metric in METRICS else RUN_METRICS  # nobody types the metrics of rows
        check_settings("ablation.", self, "equivalence_margin", metric=names, budget=BUDGETS)
        is_needed = self.equivalence_margin is None and self.metric == "val_top1"
        expected = f"a number, in {METRICS[self.metric].unit}"
        require(not is_needed, "ablation.equivalence_margin: is missing", expected)
        self._check_arms()
        self._check_contrasts()
        self._check_seeds()

    def pairs(self) -> dict[str, str]:
        """Return which arm is compared with which."""
        return {arm: self.baselines.get(arm, self.baseline) for arm in self.arms if arm != self.baseline}

    def primary_arms(self) -> list[str]:
        return self.primary or [*self.pairs()]

    def seed_of(self, arm: str, seed: int) -> int:
        """Return the seed of the run of an arm that is paired at a seed of the question."""
        return seed + self.seed_offsets.get(arm, 0)

    @property
    def tuned_setting(self) -> str | None:
        """Return the setting of train that each arm is tuned by."""
        return TUNED_SETTING.get(self.tune, self.tune) if self.tune else None

    def _check_arms(self) -> None:
        require(len(self.arms) >= 2, f"ablation.arms: has {len(self.arms)}", "two or more")
        names = {f"ablation.arms.{arm}": arm for arm in self.arms} | {f"ablation.name={self.name}": self.name}
        if self.metric in RUN_METRICS:  # the arms of rows are called as their program calls them
            for setting, name in names.items():
                require(bool(re.fullmatch(NAME, name)), setting, NAMES)
        baselines = (*self.baselines, *self.baselines.values())
        references = {"primary": self.primary, "match_parameters": self.match_parameters, "baselines": baselines}
        references |= {"baseline": [self.baseline], "seed_offsets": self.seed_offsets}
        for key, names_of_arms in references.items():
            if unknown := sorted({*names_of_arms} - self.arms.keys()):
                raise UserError(f"ablation.{key}={unknown[0]}: no such arm; choose one of {', '.join(self.arms)}")
        if self.baseline in self.primary:
            raise UserError(f"ablation.primary: {self.baseline} is the baseline, which is compared with no other arm")
        for arm, other in self.baselines.items():
            is_pair = arm not in (self.baseline, other) and other not in self.baselines
            expected = f"an arm that is compared with {self.baseline}, or {self.baseline}"
            require(is_pair, f"ablation.baselines.{arm}={other}", expected)
        pairs = self.pairs()
        for arm, key in self.match_parameters.items():
            require_choice(f"ablation.match_parameters.{arm}", key, MATCHED_BY)
            if arm not in pairs or pairs[arm] in self.match_parameters:
                raise UserError(f"ablation.match_parameters: {arm} needs an arm to match that is itself not matched")

    def _check_contrasts(self) -> None:
        for name, weights in self.contrasts.items():
            setting = f"ablation.contrasts.{name}"
            require(bool(re.fullmatch(NAME, name)) and name not in self.arms, setting, f"{NAMES}, and is no arm")
            numbers = [*weights.values()] if isinstance(weights, dict) else []
            are_weights = len(numbers) > 1 and all(type(n) in (int, float) and 0 < abs(n) < math.inf for n in numbers)
            is_contrast = are_weights and abs(math.fsum(numbers)) < 1e-9 * max(map(abs, numbers))
            require(is_contrast, f"{setting}={weights}", "two arms or more with weights other than 0, whose sum is 0")
            for arm in weights:
                require_choice(setting, arm, tuple(self.arms))

    def _check_seeds(self) -> None:
        seeds, looks = self.seeds, self.looks
        is_runs = self.metric in RUN_METRICS
        require(not is_runs or len(seeds) <= MOST_SEEDS, "ablation.seeds: too many", f"at most {MOST_SEEDS:,}")
        require(len({*seeds}) == len(seeds) > 0, f"ablation.seeds={seeds}", "one or more different values")
        for seed in seeds:
            require(0 <= seed < 2**63, f"ablation.seeds={seed}", "0 to 2**63 - 1")
        is_plan = not looks or (looks == sorted({*looks}) and looks[0] >= 3 and looks[-1] == len(seeds))
        expected = f"increasing numbers of seeds from 3 on, of which the last is all, {len(seeds)}"
        require(is_plan, f"ablation.looks={looks}", expected)
        for arm, offset in self.seed_offsets.items():
            is_other = offset >= 1 and {seed + offset for seed in seeds}.isdisjoint(seeds)
            require(is_other, f"ablation.seed_offsets.{arm}={offset}", "a number that leads to other seeds")


def _listed(value: Any) -> list[Any]:
    """Return a list. A single value is accepted for a list of one, and null for an empty list."""
    return [] if value is None else value if isinstance(value, list) else [value]


def _seeds(value: Any) -> list[Any]:
    """Return the seeds of a question, of a number the first so many. Raises UserError."""
    seeds = [*range(min(value, MOST_SEEDS + 1))] if type(value) is int else _listed(value)  # too many are refused
    are_whole = bool(seeds) and all(type(seed) is int for seed in seeds)
    require(are_whole, f"ablation.seeds={value}", "how many, as in seeds=5, or a list, as in 'seeds=[1,2,3]'")
    return seeds


def _words(key: str, value: Any) -> list[str]:
    """Return the settings of train under a key. Raises UserError for a value that is no setting in words."""
    for word in _listed(value):
        is_word = isinstance(word, str) and ("=" in word or word.startswith("~"))
        advice = '; a value with a comma stands in quotes, as in "optim.betas=[0.9,0.95]"'
        require(is_word, f"ablation.{key}: {word}", f"key=value of train, as in [model.dropout=0.1]{advice}")
    return _listed(value)


def weighted_sum(weights: Mapping[str, float]) -> str:
    """Return weights of arms in words.

    >>> weighted_sum({"a": 1, "b": -0.5, "c": -0.5})
    'a - 0.5 b - 0.5 c'
    """
    sizes = {arm: f"{abs(weight):g} " if abs(weight) != 1 else "" for arm, weight in weights.items()}
    terms = (f"{'-' if weights[arm] < 0 else '+'} {size}{arm}" for arm, size in sizes.items())
    return " ".join(terms).removeprefix("+ ")


# --- the settings of the commands

EXIT_CODES = ("done", "verdict")
# Parameters of sbatch that each run decides.
FROM_RUN = {"job_name", "dependency", "time", "cpus_per_task", "gpus_per_node", "ntasks_per_node"}


@dataclass(slots=True, kw_only=True)
class RayConfig:
    address: str = "auto"  # address of the cluster; auto: the cluster of this machine


@dataclass(slots=True, kw_only=True)
class SlurmConfig:
    """What sbatch is asked for by each run. Cores and GPUs follow from the run: its threads and its device."""

    partition: str | None = None  # partition of the jobs; null: default of the cluster
    minutes: int = 60  # minutes of a job; a longer run is queued again, from its last checkpoint, up to three times
    memory_gb: float | None = None  # GB of memory of a job; null: default of the cluster
    parameters: dict[str, Any] = field(default_factory=dict)  # further parameters, as submitit names them: {qos: long}

    def __post_init__(self) -> None:
        check_settings("slurm.", self, "minutes", "memory_gb")
        keys = [*self.parameters, *(self.parameters.get("additional_parameters") or ())]
        if decided := sorted(FROM_RUN & {key.replace("-", "_") for key in keys}):
            raise UserError(f"slurm.parameters.{decided[0]}: expected no such key; the run and slurm.minutes decide it")


@dataclass(slots=True, kw_only=True)
class AblateConfig:
    """The command line of ablate.py."""

    ablation: Question
    output_dir: str | None = None  # folder of the ablation; null: ablations/NAME, or NAME-HASH if settings are typed
    confirm: str | None = None  # folder of a finished ablation whose primary comparisons are asked again on fresh seeds
    plan_only: bool = False  # whether the plan and its cost are printed, and nothing is trained
    json: bool = False  # whether standard output is one JSON object with the verdicts, and nothing else
    exit_code: str = "done"  # what the exit code tells: done, or verdict (docs/agents.md)
    executor: str = "local"  # where runs are made: local, ray or slurm
    ray: RayConfig = field(default_factory=RayConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    workers: int | None = None  # most runs at a time; null: one for each GPU, else as many as the cores hold; Slurm: 64
    overrides: list[str] = field(default_factory=list)  # settings of train on this line; not a setting to type

    def __post_init__(self) -> None:
        expand_paths(self, "output_dir", "confirm")
        check_settings("", self, "workers", executor=("local", "ray", "slurm"), exit_code=EXIT_CODES)
        require_choice("ablation.metric", self.ablation.metric, RUN_METRICS)


@dataclass(slots=True, kw_only=True)
class ReportConfig:
    """The command line of report.py: one of the first three; output_dir beside rows is where their report goes."""

    output_dir: str | None = None  # folder of an ablation to report; with `rows`, folder for their report
    run_dir: str | None = None  # directory of a run to report
    rows: str | None = None  # CSV file of any program, to be judged; its columns are arm, seed and value
    baseline: str | None = None  # arm of `rows` with which the others are compared; null: the first of two arms
    margin: float | None = None  # equivalence margin of `rows`, in the unit of the values; null: no arms are equivalent
    higher: bool = False  # whether a higher value in `rows` is better
    json: bool = False  # whether standard output is one JSON object with the verdicts, and nothing else
    exit_code: str = "done"  # what the exit code tells: done, or verdict (docs/agents.md)

    def __post_init__(self) -> None:
        expand_paths(self, "output_dir", "run_dir", "rows")
        require_choice("exit_code", self.exit_code, EXIT_CODES)
        place = None if self.rows else self.output_dir  # else of the report
        if sum(value is not None for value in (place, self.run_dir, self.rows)) != 1:
            ways = "output_dir=DIR of an ablation, run_dir=RUN or rows=FILE.csv"
            raise UserError(f"output_dir: give {ways}, one of them")
        if self.rows is None:
            check_unused("", self, "rows=null (rows=FILE.csv is judged)", "baseline", "margin", "higher")
        if self.run_dir is not None:
            check_unused("", self, "run_dir", "json", "exit_code")
