"""The plan of an ablation: which runs there are, how long each trains, and which trials tuning makes next.

A plan is a pure function of the settings, the text, the code and the results that exist: it trains and writes nothing.
A run is named by a hash of all that decides it, so a run that exists is found again, and what has changed has another
name. This is what resuming an ablation and adding arms or seeds to it rests on.
"""

import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lm.ablation.arms import Arm, Arms, build_arm, build_arms, change, check_start, common_threads
from lm.ablation.history import designs_seen
from lm.ablation.record import AblationRecord, ArmRecord, BaseRecord, RunRecord, TrialRecord, question_of
from lm.ablation.results import Results, RunReader, results_of
from lm.ablation.run_files import RunFiles
from lm.ablation.step_timing import measure
from lm.ablation.tuning import ArmTrials, TuningState, planned_trials, round_value, tune
from lm.config import RunConfig, UserError
from lm.config.ablation import METRICS, AblateConfig, AblationConfig
from lm.config.checks import error_prefix
from lm.config.identity import config_hash
from lm.formats.base import read_base
from lm.system.files import json_sha256

BASE = "base"  # what the runs that the arms start from are called
NOT_TRAINED = "not trained yet"  # in place of the hash of the weights of a base
EQUAL_COST = 0.02  # FLOPs of a token that differ by less count as equal
STARTUP_SECONDS = 4.0  # of a run, before and after its steps
PACKAGES = ("torch", "lightning", "scipy", "numpy", "tokenizers", "datasets")


@dataclass(slots=True, frozen=True)
class RunSpec:
    """One run of an ablation."""

    arm: str
    seed: int
    steps: int
    run_dir: str  # relative to the ablation's folder: cells/NAME, trials/NAME or bases/NAME
    run: RunConfig  # its run_dir is absolute
    tuned: dict[str, float]
    identity: dict[str, str]  # hashes of its text, tokenizer and code, its device and precision

    @property
    def is_trial(self) -> bool:
        return self.run_dir.startswith("trials/")

    @property
    def files(self) -> RunFiles:
        return RunFiles(Path(str(self.run.run_dir)))

    @property
    def threads(self) -> int:
        return int(self.run.threads or 1)

    @property
    def gpus(self) -> int:
        return int(self.identity["device"] in ("cuda", "gpu"))


@dataclass(slots=True)
class Plan:
    config: AblationConfig
    arms: Arms
    base: Arm | None  # of the runs that the arms start from, one for each seed
    record: AblationRecord  # of the earlier call, with what is asked now
    reader: RunReader
    before: AblationRecord  # of the earlier call
    specs: dict[tuple[Any, ...], RunSpec] = field(default_factory=dict, repr=False)
    base_hashes: dict[str, str] = field(default_factory=dict, repr=False)  # of finished bases, by run_dir
    n_seeds: int | None = None  # that are reported; fewer than asked for where a planned look has decided

    # --- runs

    def spec(self, arm: Arm, seed: int, steps: int, tuned: dict[str, float], folder: str) -> RunSpec:
        start = arm.start(seed)
        key = (arm.name, seed, steps, *tuned.items(), folder, *start.items())
        if key not in self.specs:  # a thousand are asked for many times, and each takes milliseconds
            run = change(arm.run, {**tuned, "trainer.max_steps": steps, "seed": seed, "max_tokens": None, **start})
            settings = config_hash(run, arm.identity["data_hash"], arm.identity["tokenizer_hash"])
            name = f"{arm.name}-seed{seed}-{json_sha256({'config': settings, **arm.identity})[:10]}"
            run = replace(run, run_dir=str((self.reader.folder / folder / name).absolute()))
            self.specs[key] = RunSpec(arm.name, seed, steps, f"{folder}/{name}", run, tuned, arm.identity)
        return self.specs[key]

    def reported(self, n: int | None = None) -> list[RunSpec]:
        """The runs of the first n seeds, or of all that are reported: seed by seed, so that pairs become complete.

        Those of an arm whose hyperparameters are not chosen yet are left out.
        """
        return [*{spec.run_dir: spec for name, *_, spec in self._runs(n) if not self._is_open(name)}.values()]

    def _runs(self, n: int | None = None) -> Iterator[tuple[str, int, str, RunSpec]]:
        """The arm, the seed of the pair, the budget, and the run, which may serve several budgets."""
        for seed in self.config.seeds[: self.n_seeds if n is None else n]:
            for name, arm in self.arms.items():
                for budget in self.config.budgets:
                    own_seed = seed + self.config.seed_offsets.get(name, 0)
                    yield name, seed, budget, self.spec(arm, own_seed, arm.steps[budget], arm.tuned, "cells")

    def _is_open(self, name: str) -> bool:
        """Whether the arm's hyperparameters are not chosen yet."""
        return bool(self.config.tune.trials) and not self.arms[name].tuned

    def bases(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """The runs that these start from."""
        seeds = sorted({spec.seed for spec in specs}) if self.base else []
        return [self.base_spec(seed) for seed in seeds]

    def base_spec(self, seed: int) -> RunSpec:
        assert self.base is not None
        return self.spec(self.base, seed, self.base.steps["own"], {}, "bases")

    def missing(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """Those that have no result yet. A diverged one has: it would diverge again."""
        return [spec for spec in specs if self.reader.outcome(spec.run_dir).status in ("missing", "failed")]

    def expected(self) -> list[RunSpec]:
        """All runs that are known to be missing; those of untuned arms under names that will change."""
        specs = [*{spec.run_dir: spec for *_, spec in self._runs()}.values(), *self.tune()[1]]
        return self.missing([*self.bases(self.missing(specs)), *specs])

    def look(self, n: int) -> bool:
        """Whether the planned look at the first n seeds decides all that is asked, so that no more runs are made."""
        if n not in self.config.looks:
            return False
        contrasts = self.results().first_seeds(n).contrasts
        asked = contrasts[contrasts.family.isin(["primary", "interaction"])] if self.config.primary else contrasts
        if (asked.verdict != "undecided").all():
            self.n_seeds = n
        return self.n_seeds == n

    # --- tuning

    def tune(self) -> tuple[TuningState, list[RunSpec]]:
        """How far the tuning is by the results that exist, and the runs of the trials that it asks for next.

        Sets the hyperparameters of the arms when it has finished. Trials of an arm that keeps its hyperparameters are
        asked for if their results are gone, for its regret rests on them.
        """
        kept = {name: before for name in self._tuned_arms() if (before := self._kept(name))}
        arms = {name: ArmTrials(self._start(name), {}, name not in kept) for name in self._tuned_arms()}
        while True:
            state, missing, new = tune(arms, self.config.tune, self._is_allowed), list[RunSpec](), False
            for name, trials in state.next_trials.items():
                for settings in trials:
                    specs = self.trial(name, settings)
                    if (loss := self._loss(specs)) is None:
                        missing += specs
                    else:
                        losses = {**arms[name].losses, arms[name].key(settings): loss}
                        arms[name], new = replace(arms[name], losses=losses), True
            if not new:
                break
        for name, tuned in state.arms.items():
            self.arms[name].tuned, self.arms[name].centre = tuned.settings, tuned.centre
        for name, before in kept.items():
            self.arms[name].tuned, self.arms[name].centre = before.tuned, before.centre
            missing += self.missing([spec for t in self._recorded_trials(name) for spec in self.trial(name, t.values)])
        return state, missing

    def _tuned_arms(self) -> list[str]:
        return [*self.arms] if self.config.tune.trials else []

    def _start(self, name: str) -> dict[str, float]:
        """The values of its hyperparameters with which the search of an arm begins: not those that are null or 0."""
        settings = self.arms[name].settings
        return {key: float(settings[key]) for key in self.config.tune.hyperparameters if settings[key]}

    def _kept(self, name: str) -> ArmRecord | None:
        """The arm with the hyperparameters that an earlier call has chosen and made a run with: it keeps them.

        None if there are none, or if what is tuned, where the search begins, the settings, the text or the code have
        changed since.
        """
        before, trials = self.record.arms.get(name), self._recorded_trials(name)
        if before is None or not before.tuned or not trials or self.before.tune != self.config.tune:
            return None
        centre = {key: round_value(value) for key, value in self._start(name).items()}  # of the first search
        if trials[0].run_dirs != [spec.run_dir for spec in self.trial(name, centre)]:
            return None
        runs = [run for run in self.record.runs if run.arm == name]
        return before if any(self.reader.outcome(run.run_dir).result for run in runs) else None

    def _recorded_trials(self, name: str) -> list[TrialRecord]:
        return [trial for trial in self.record.trials if trial.arm == name]

    def trial(self, name: str, settings: dict[str, float]) -> list[RunSpec]:
        """The runs of a trial, one for each tuning seed."""
        arm, budget = self.arms[name], self.config.budgets[0]
        return [self.spec(arm, seed, arm.steps[budget], settings, "trials") for seed in self.config.tune.seeds]

    def _is_allowed(self, name: str, settings: dict[str, float]) -> bool:
        try:
            return bool(self.trial(name, settings))
        except UserError:  # for example a fraction above one
            return False

    def _loss(self, specs: Sequence[RunSpec]) -> float | None:
        """The mean over the tuning seeds, lower is better; infinite where training diverged; None: not finished."""
        outcomes = [self.reader.outcome(spec.run_dir) for spec in specs]
        if any(outcome.status == "diverged" for outcome in outcomes):
            return math.inf
        if any(outcome.status != "done" for outcome in outcomes):
            return None
        scores = [float(outcome.result[self.config.metric]) for outcome in outcomes]
        return sum(scores) / len(scores) * (1 if METRICS[self.config.metric][0] else -1)

    # --- views

    def seconds(self, spec: RunSpec) -> float:
        """What a run takes, as measured on this machine."""
        arm = self.base if self.base and spec.arm == BASE else self.arms[spec.arm]
        return STARTUP_SECONDS + arm.seconds(spec.steps)

    def results(self) -> Results:
        return results_of(self.current_record(), self.reader)

    def current_record(self) -> AblationRecord:
        state, _ = self.tune()
        return replace(
            self.record,
            seeds=self.config.seeds[: self.n_seeds],
            arms={name: arm.record() for name, arm in self.arms.items()},
            runs=self.run_records(),
            bases=self._base_records(),
            trials=[trial for name in self._tuned_arms() for trial in self._trial_records(name, state)],
        )

    def _trial_records(self, name: str, state: TuningState) -> list[TrialRecord]:
        if name not in state.trials:  # its hyperparameters are those of an earlier call
            return self._recorded_trials(name)
        records = []
        for values, searches in state.trials[name]:
            run_dirs = [spec.run_dir for spec in self.trial(name, values)]
            records.append(TrialRecord(arm=name, searches=searches, values=values, run_dirs=run_dirs))
        return records

    def run_records(self) -> list[RunRecord]:
        """The reported runs; those of an arm whose hyperparameters are not chosen yet have a name that changes."""
        records: dict[str, RunRecord] = {}
        place = {key: i for i, key in enumerate(product(self.arms, self.config.budgets))}
        for name, seed, budget, spec in sorted(self._runs(), key=lambda run: place[run[0], run[2]]):
            new = RunRecord(arm=name, seed=seed, budgets=[], run_dir=spec.run_dir, steps=spec.steps)
            records.setdefault(spec.run_dir, new).budgets.append(budget)
        return [*records.values()]

    def _base_records(self) -> list[BaseRecord]:
        records, before = [], {base.run_dir: base for base in self.record.bases}
        for spec in map(self.base_spec, self.base_seeds()):
            loss = self.reader.outcome(spec.run_dir).result.get("val_loss")
            new = BaseRecord(seed=spec.seed, run_dir=spec.run_dir, sha256=self.base_sha256(spec), val_loss=loss)
            records.append(before.get(spec.run_dir, new) if loss is None else new)
        return records

    def base_seeds(self) -> list[int]:
        """The seeds for which there is a base run."""
        if self.base is None:
            return []
        of_tuning = self.config.tune.seeds if self.config.tune.trials else []
        return sorted({*of_tuning, *(spec.seed for *_, spec in self._runs())})

    def base_sha256(self, spec: RunSpec) -> str | None:
        """Of the weights of a finished base, also of one that is a line of the record and whose folder is gone."""
        if spec.run_dir in self.base_hashes:
            return self.base_hashes[spec.run_dir]
        if (self.reader.folder / spec.run_dir).exists() and self.reader.outcome(spec.run_dir).status == "done":
            self.base_hashes[spec.run_dir] = read_base(str(self.reader.folder / spec.run_dir)).sha256
            return self.base_hashes[spec.run_dir]
        return next((base.sha256 for base in self.record.bases if base.run_dir == spec.run_dir), None)

    def stale_runs(self) -> list[str]:
        """Finished runs in the folder that the plan does not ask for: settings, text, code or seeds have changed."""
        if any(map(self._is_open, self.arms)):  # the names of their runs are not known yet
            return []
        planned = {run.run_dir for run in self.run_records()}
        return [name for name in self.reader.finished() if name.startswith("cells/") and name not in planned]

    def trials_to_make(self) -> tuple[int, int]:
        """The least and the greatest number of runs that the tuning still makes."""
        if not any(map(self._is_open, self.arms)):
            return 0, 0
        state, _ = self.tune()
        made, ahead = (sum(map(len, trials.values())) for trials in (state.trials, state.next_trials))
        arms = {name: ArmTrials(self._start(name), is_open=self._is_open(name)) for name in self._tuned_arms()}
        numbers = planned_trials(arms, self.config.tune).values()
        n_seeds = len(self.config.tune.seeds)
        least, most = (max(sum(bounds) - made, ahead) * n_seeds for bounds in zip(*numbers, strict=True))
        return least, most

    def expected_seconds(self) -> tuple[float, float]:
        """The least and the greatest duration of what is missing, on so many workers as the plan has."""
        open_arms = [arm for name, arm in self.arms.items() if self._is_open(name)]
        seconds = sum(self.seconds(spec) for spec in self.expected() if not (spec.is_trial and self._is_open(spec.arm)))
        trials = [STARTUP_SECONDS + arm.seconds(arm.steps[self.config.budgets[0]]) for arm in open_arms]
        trial = sum(trials) / len(trials) if trials else 0.0
        least, most = ((seconds + trial * n) / self.record.workers for n in self.trials_to_make())
        return least, most


def make_plan(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    base: RunConfig | None,
    before: AblationRecord | None,
    reader: RunReader,
) -> Plan:
    """`runs` has the configuration of each arm, `base` that of the runs that they start from, `before` the record of an
    earlier call. Raises UserError for what the user can mend.
    """
    ablation = config.ablation
    record = before or AblationRecord(**question_of(ablation))
    threads = record.threads if before else common_threads([*runs.values(), *filter(None, [base])])
    arms = build_arms(ablation, runs, threads, record.arms)
    plan = Plan(ablation, arms, None, record, reader, record)
    if base is not None:
        with error_prefix("ablation.base"):
            plan.base = build_arm(BASE, ablation.base or [], base, threads, {})
        _start_from_base(plan, plan.base)
    timed = arms | ({BASE: plan.base} if plan.base else {})
    seconds_per_step = measure(timed, record.seconds_per_step if record.ended else {})  # a machine may be busy
    set_steps(ablation, arms)
    plan.record = replace(
        record,
        **question_of(ablation),
        overrides=config.overrides,
        common=ablation.overrides,
        base=ablation.base if plan.base else None,
        contrasts=ablation.contrasts(),
        designs_seen=designs_seen(before, reader) if before else [],
        begun=record.begun or now(),
        ended=None,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs",
        threads=threads,
        python=platform.python_version(),
        versions={package: version(package) for package in PACKAGES},
        seconds_per_step=seconds_per_step,
    )
    plan.tune()
    for n in ablation.looks:  # of an earlier call
        if plan.missing(plan.reported(n)) or plan.look(n):
            break
    return plan


def _start_from_base(plan: Plan, base: Arm) -> None:
    """Let the arms start from the base of their seed. Raises UserError if an arm cannot."""

    def start(seed: int) -> dict[str, Any]:
        spec = plan.base_spec(seed)
        return {
            "init_from": str(plan.reader.folder / spec.run_dir),
            "init_sha256": plan.base_sha256(spec) or NOT_TRAINED,
        }

    for name, arm in plan.arms.items():
        if arm.identity["tokenizer_hash"] != base.identity["tokenizer_hash"]:
            raise UserError(f"ablation.arms.{name}: has another tokenizer than ablation.base")
        check_start(arm, base.run.model, base.run.head, base.run.data.seq_len)
        arm.start = start


def set_steps(config: AblationConfig, arms: Arms) -> None:
    """How long each arm trains, so that it spends what the arm it is compared with spends.

    A schedule that decays to the end cannot be read early, so each budget is a run of its own length.
    """
    for name, arm in arms.items():
        root = arms[config.root(name)]
        tokens = root.steps["own"] * root.tokens_per_step / arm.tokens_per_step
        for budget in config.budgets:
            ratio = 1.0 if budget == "tokens" else root.flops_per_token / arm.flops_per_token
            arm.steps[budget] = max(1, round(tokens * (ratio if abs(ratio - 1) > EQUAL_COST else 1)))


def now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
