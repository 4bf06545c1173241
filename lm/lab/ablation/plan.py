"""The plan of an ablation: which runs there are, how long each trains, and which are to be made next.

`next_runs` is a pure function of the settings, the text, the code and the results that exist: it trains and writes
nothing. A run is named by a hash of all that decides it, so a run that exists is found again, and what has changed has
another name. This is what resuming an ablation and adding arms or seeds to it rests on.
"""

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lm.config import NO_LIMIT, RunConfig, config_hash, deciding_settings
from lm.data.tokens import TextData
from lm.errors import UserError
from lm.lab.ablation.arms import Arm, Arms, build_arms, change, set_steps, time_steps
from lm.lab.ablation.contrasts import ENDED
from lm.lab.ablation.record import FOLDERS, REPORTED, TRIAL, AblationRecord, ArmRecord, Run, RunFiles, question_of
from lm.lab.ablation.results import RunReader, designs_seen, results_of
from lm.lab.ablation.settings import METRICS, AblateConfig, AblationConfig, TuneConfig
from lm.lab.ablation.tuning import ArmTrials, Settings, TuningState, round_value, search_size, tune
from lm.system.device import set_threads
from lm.system.files import json_sha256

HASHES = {"source_hash": "code", "data_hash": "text", "tokenizer_hash": "tokenizer"}  # of an arm, in words
PACKAGES = ("torch", "lightning", "scipy", "numpy", "tokenizers", "datasets")
Seeded = Mapping[tuple[str, int], Mapping[str, Any]]  # by arm and seed
Tuned = dict[str, tuple[Settings, Settings]]  # by arm: its hyperparameters, and the centre of their search


@dataclass(slots=True, kw_only=True)
class RunSpec(Run):
    """A run with all that is needed to make it."""

    run: RunConfig  # its run_dir is absolute
    identity: dict[str, str]  # hashes of its text, tokenizer and code, its device and precision

    @property
    def files(self) -> RunFiles:
        return RunFiles(Path(str(self.run.run_dir)))

    @property
    def threads(self) -> int:
        return int(self.run.threads or 1)

    @property
    def gpus(self) -> int:
        return int(self.identity["device"] in ("cuda", "gpu"))


@dataclass(slots=True, frozen=True, eq=False)
class Plan:
    """All that decides which runs there are."""

    config: AblationConfig
    arms: Arms
    reader: RunReader  # of the results that there are
    record: AblationRecord  # what is asked; its arms and runs follow from a step
    before: AblationRecord  # of an earlier call
    seeded: Seeded  # the settings of an arm that depend on the seed of the run
    specs: dict[tuple[Any, ...], RunSpec] = field(default_factory=dict, repr=False)  # those that were asked for

    def spec(self, purpose: str, arm: Arm, seed: int, budget: str, values: Settings) -> RunSpec:
        steps = arm.steps[budget]
        key = (purpose, arm.name, seed, steps, *values.items())
        if key not in self.specs:  # a thousand are asked for many times, and each takes milliseconds
            own_seed = seed + self.config.seed_offsets.get(arm.name, 0) if purpose == REPORTED else seed
            length = {"trainer.max_steps": steps, "trainer.max_epochs": None, "max_tokens": None, "max_minutes": None}
            of_seed = self.seeded.get((arm.name, own_seed), {})
            run = change(arm.run, {**of_seed, **values, **length, "seed": own_seed})
            settings = config_hash(run, arm.identity["data_hash"], arm.identity["tokenizer_hash"])
            name = json_sha256({"config": settings, **arm.identity})[:10]
            run_dir = f"{FOLDERS[purpose]}/{arm.name}-seed{own_seed}-{name}"
            run = replace(run, run_dir=str((self.reader.folder / run_dir).absolute()))
            about: dict[str, Any] = {"seed": seed, "steps": steps, "values": values, "run_dir": run_dir}
            self.specs[key] = RunSpec(purpose=purpose, arm=arm.name, **about, run=run, identity=arm.identity)
        return self.specs[key]

    def reported(self, seeds: Sequence[int], tuned: Tuned) -> list[RunSpec]:
        """The runs of these seeds: seed by seed, so that pairs become complete."""
        runs = list[RunSpec]()
        for seed in seeds:
            for arm in self.arms:
                values, is_open = tuned[arm][0] if arm in tuned else {}, self.config.tune.trials and arm not in tuned
                spec = self.spec(REPORTED, self.arms[arm], seed, self.config.budget, values)
                # a run without tuning, which may be there, is another one
                runs.append(replace(spec, run_dir=f"{spec.run_dir}-untuned") if is_open else spec)
        return runs

    def trial(self, name: str, values: Settings, search: int = 0) -> list[RunSpec]:
        """The runs of a trial, one for each tuning seed."""
        arm, budget = self.arms[name], self.config.budget
        specs = [self.spec(TRIAL, arm, seed, budget, values) for seed in self.config.tune.seeds]
        return [replace(spec, search=search) for spec in specs]

    def start(self, name: str) -> Settings:
        """The values of its hyperparameters with which the search of an arm begins: not those that are null or 0."""
        settings = self.arms[name].settings
        return {key: float(settings[key]) for key in self.config.tune.hyperparameters if settings[key]}

    def is_missing(self, run: Run) -> bool:
        """Whether it has no result yet. A diverged one has: it would diverge again."""
        return self.reader.outcome(run.run_dir).status in ("missing", "failed")


@dataclass(slots=True, frozen=True, eq=False)
class Step:
    """What is to be made next, and what the results that there are have decided."""

    todo: list[RunSpec]  # independent of each other: they have no result
    missing: list[RunSpec]  # all that are known to be needed and have no result
    runs: list[RunSpec]  # all that are asked for; those of an untuned arm under names that will change
    record: AblationRecord  # of what is asked, with what has been decided: settings and seeds
    n_trials: tuple[int, int]  # the least and the most runs that tuning still makes


def next_runs(plan: Plan) -> Step:
    """The step that follows from the results in the plan's folder."""
    trials, tuned, n_trials = _search(plan)
    seeds, up_to_look = _looks(plan, trials, tuned)
    asked = [*trials, *plan.reported(seeds, tuned)]
    return Step(
        todo=[run for run in (*trials, *up_to_look) if plan.is_missing(run)],
        missing=[run for run in asked if plan.is_missing(run)],
        runs=asked,
        record=_record(plan, tuned, asked, seeds),
        n_trials=n_trials,
    )


def seconds_to_go(plan: Plan, step: Step) -> tuple[float, float]:
    """The least and the greatest duration of what is missing, on so many workers as the plan has."""
    untuned = [plan.arms[name] for name in step.record.untuned()]
    trials = [arm.seconds(arm.steps[plan.config.budget]) for arm in untuned]
    mean = sum(trials) / len(trials) if trials else 0.0
    is_open = {arm.name for arm in untuned}
    decided = sum(
        plan.arms[run.arm].seconds(run.steps) for run in step.missing if run.purpose != TRIAL or run.arm not in is_open
    )
    least, most = ((decided + mean * n) / plan.record.workers for n in step.n_trials)
    return least, most


def lost_to_new_code(plan: Plan, step: Step) -> str:
    """Return in words how many finished runs of an ablation that has ended other code or text would make again."""
    before, seeds = plan.before, plan.config.seeds
    if (
        not (before.ended or before.designs_seen)
        or (before.tune, before.budget) != (plan.config.tune, plan.config.budget)
        or not step.missing
    ):
        return ""
    changed = [
        (run.arm, hashes)
        for run in before.of(REPORTED)
        if run.arm in plan.arms and run.seed in seeds
        if (hashes := _changed(before.arms[run.arm], plan.arms[run.arm]))
        if plan.reader.outcome(run.run_dir).status in ENDED
    ]
    if not changed:
        return ""
    arms, what = (", ".join(dict.fromkeys(names)) for names in zip(*changed, strict=True))
    origin = "install the version of lm" if what == "code" else f"use the {what}"
    return (
        f"{len(changed)} finished run{'s' * (len(changed) > 1)} ({arms}) no longer count, for the {what} has changed "
        f"since; name another output_dir=DIR, or {origin} that made them"
    )


def _changed(before: ArmRecord, now: ArmRecord) -> str:
    """What has changed, if it is the code or the text and nothing else; empty if not."""
    changed = {key for key in now.identity if now.identity[key] != before.identity.get(key)}
    keys = before.settings.keys() & now.settings.keys()  # other code may have other settings
    first, second = ({key: arm.settings[key] for key in keys} for arm in (before, now))
    if not changed <= {*HASHES} or deciding_settings(first) != deciding_settings(second):
        return ""
    return " and the ".join(HASHES[key] for key in HASHES if key in changed)


def _record(plan: Plan, tuned: Tuned, runs: Sequence[RunSpec], seeds: list[int]) -> AblationRecord:
    def part(kind: type, whole: Any) -> Any:
        return kind(**{item.name: getattr(whole, item.name) for item in fields(kind)})

    arms = {name: part(ArmRecord, arm) for name, arm in plan.arms.items()}
    for name, (settings, centre) in tuned.items():
        arms[name] = replace(arms[name], tuned=settings, centre=centre)
    rows = sorted((part(Run, run) for run in runs), key=lambda run: (run.purpose, [*arms].index(run.arm)))
    return replace(plan.record, seeds=seeds, arms=arms, runs=rows)


# --- tuning


def _search(plan: Plan) -> tuple[list[RunSpec], Tuned, tuple[int, int]]:
    """The trials that are asked for so far, what they have decided, and how many runs are still to come.

    Trials of an arm that keeps its hyperparameters are asked for if their results are gone, for its regret rests on
    them.
    """
    config = plan.config.tune
    names = [*plan.arms] if config.trials else []
    kept = {name: before for name in names if (before := _kept(plan, name))}
    arms = {name: ArmTrials(plan.start(name)) for name in names if name not in kept}
    is_new = True
    while is_new:
        state, is_new = tune(arms, config, partial(_is_allowed, plan)), False
        for name, trials in state.next_trials.items():
            for values in trials:
                if (loss := _loss(plan, plan.trial(name, values))) is not None:
                    losses = {**arms[name].losses, arms[name].key(values): loss}
                    arms[name], is_new = replace(arms[name], losses=losses), True
    runs = list[RunSpec]()
    for name in names:
        made = [(dict(values), search) for values, search in plan.before.searches(name).items()] if name in kept else []
        made += state.trials.get(name, ())
        made += [(values, 0) for values in state.next_trials.get(name, ())]
        runs += [run for values, search in made for run in plan.trial(name, values, search)]
    tuned = {name: (arm.settings, arm.centre) for name, arm in state.arms.items()}
    tuned |= {name: (before.tuned, before.centre) for name, before in kept.items()}
    return runs, tuned, _trials_to_go(arms, state, config)


def _kept(plan: Plan, name: str) -> ArmRecord | None:
    """The arm with the hyperparameters that an earlier call has chosen: it keeps them, whatever would be chosen now.

    None if there are none, or if what is tuned, where the search begins, the settings, the text or the code have
    changed since.
    """
    before = plan.before.arms.get(name)
    if before is None or not before.tuned or plan.before.tune != plan.config.tune:
        return None
    centre = {key: round_value(value) for key, value in plan.start(name).items()}  # of the first search
    recorded = {run.run_dir for run in plan.before.of(TRIAL)}
    return before if recorded.issuperset(run.run_dir for run in plan.trial(name, centre)) else None


def _is_allowed(plan: Plan, name: str, values: Settings) -> bool:
    try:
        return bool(plan.trial(name, values))
    except UserError:  # for example a fraction above one
        return False


def _loss(plan: Plan, runs: Sequence[Run]) -> float | None:
    """The mean over the tuning seeds, lower is better; infinite where training diverged; None: not finished."""
    outcomes = [plan.reader.outcome(run.run_dir) for run in runs]
    if any(outcome.status == "diverged" for outcome in outcomes):
        return math.inf
    if any(outcome.status != "done" for outcome in outcomes):
        return None
    scores = [float(outcome.result[plan.config.metric]) for outcome in outcomes]
    return sum(scores) / len(scores) * (1 if METRICS[plan.config.metric][0] else -1)


def _trials_to_go(arms: Mapping[str, ArmTrials], state: TuningState, config: TuneConfig) -> tuple[int, int]:
    if not state.next_trials:
        return 0, 0
    made, ahead = (sum(map(len, trials.values())) for trials in (state.trials, state.next_trials))
    searched = [len(arm.start) for arm in arms.values() if arm.start]  # numbers of hyperparameters
    totals = sum(search_size(k, config) for k in searched), config.trials * len(searched)
    least, most = (max(total - made, ahead) * len(config.seeds) for total in totals)
    return least, most


# --- looks


def _looks(plan: Plan, trials: Sequence[RunSpec], tuned: Tuned) -> tuple[list[int], list[RunSpec]]:
    """The seeds that are reported, and the reported runs up to the next decision.

    A decision waits until all runs before it have ended: a missing one could change it. Where one has failed nothing is
    decided, for the runs that are left would decide, and the ablation goes on. What was judged by more seeds stays so.
    """
    config, before = plan.config, plan.before
    judged = len(before.seeds) if before.ended and before.looks == config.looks else 0
    ready = [name for name in plan.arms if name in tuned or not config.tune.trials]
    for n in sorted({*config.looks, len(config.seeds)}):
        runs = [run for run in plan.reported(config.seeds[:n], tuned) if run.arm in ready]
        status = [plan.reader.outcome(run.run_dir).status for run in runs]
        if len(ready) < len(plan.arms) or "missing" in status:
            break
        if n in config.looks and n >= judged and "failed" not in status:
            record = _record(plan, tuned, [*trials, *runs], config.seeds[:n])
            if all(row.verdict != "undecided" for row in results_of(record, plan.reader).asked()):
                return config.seeds[:n], runs
    return config.seeds, runs


# --- from a question to its plan


def make_plan(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    seeded: Seeded,
    before: AblationRecord | None,
    reader: RunReader,
    command: str,
    default_workers: Callable[[int], int],
) -> Plan:
    """`runs` has the configuration of each arm, `seeded` the settings that depend on the seed, `before` the record of
    an earlier call; `default_workers` is asked with the threads and the least bytes of a run. Raises UserError.
    """
    ablation, texts = config.ablation, dict[str, TextData]()
    most_threads = max((run.threads for run in runs.values() if run.threads), default=1)
    threads = set_threads(before.threads if before else most_threads)  # of every run that does not set its own
    earlier = before or AblationRecord(**question_of(ablation))
    arms = build_arms(ablation, runs, threads, earlier.arms, texts)
    root = arms[ablation.root(ablation.baseline)]
    if (minutes := root.run.max_minutes) is not None:  # that of all arms
        if root.steps["own"] == NO_LIMIT:
            time_steps([root])
            root.steps["own"] = max(1, round(60 * minutes / root.seconds_per_step))
        for arm in arms.values():
            arm.steps["own"] = root.steps["own"]
    set_steps(ablation, arms)
    workers = config.workers or default_workers(threads)
    record = replace(
        earlier,
        **question_of(ablation),
        overrides=config.overrides,
        common=ablation.overrides,
        pairs=ablation.pairs(),
        designs_seen=designs_seen(before, reader) if before else [],
        begun=earlier.begun or now(),
        ended=None,
        command=command,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs",
        threads=threads,
        workers=workers,
        python=platform.python_version(),
        versions={package: version(package) for package in PACKAGES},
    )
    return Plan(ablation, arms, reader, record, earlier, seeded)


def now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
