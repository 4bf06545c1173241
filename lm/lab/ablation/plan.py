"""The plan of an ablation: which runs there are, and which are to be made next.

`next_runs` is a pure function of the plan and of the outcomes that exist: it trains and writes nothing. A run is named
by a hash of everything that decides its result, so an unchanged run is found and a changed one gets a new folder.
Resuming an ablation and adding arms or seeds to it rest on this. A tuned arm has a ladder of rungs, whose middle a
pilot finds (`tuning`); any other arm has the one rung 0.
"""

import heapq
import math
import os
import platform
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch

from lm.cli.arguments import PATHS
from lm.config import RunConfig, change, config_hash, user_classes
from lm.data.paths import as_started
from lm.data.tokens import TextData, prepare
from lm.errors import UserError
from lm.lab.ablation.arms import Arm, Arms, build_arms, needs_gpu
from lm.lab.ablation.folder import (
    ENDED,
    PILOT,
    REPORTED,
    RUNS,
    AblationRecord,
    ArmRecord,
    Run,
    RunFiles,
    RunReader,
    design_of,
    identifying,
    read_record,
    settings_of_run,
    sibling,
)
from lm.lab.ablation.question import METRICS, AblateConfig, Question
from lm.lab.ablation.results import Results
from lm.lab.ablation.tuning import AROUND, LADDER, PILOT_SEEDS, factor, pilot
from lm.lab.init_from.base import read_base
from lm.system.device import set_threads
from lm.system.files import json_sha256

ONE_PERCENT = 0.01  # nats per token: 1 % of perplexity
CONTENT = {  # setting that is a path -> hash of what lies there
    **dict.fromkeys(("data.path", "data.val_path"), "data_hash"),
    "tokenizer.path": "tokenizer_hash",
    "init_from": "init_sha256",
}
MAX_TRIES = 2  # of a run that fails or is killed, in one call


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
        return int(needs_gpu(self.identity))


@dataclass(slots=True, frozen=True, eq=False)
class Plan:
    """All that decides which runs there are."""

    arms: Arms
    reader: RunReader  # of the outcomes that there are
    record: AblationRecord  # what is asked; its runs follow from a stage
    specs: dict[tuple[str, int, float], RunSpec] = field(default_factory=dict, repr=False)  # that were asked for

    @property
    def question(self) -> Question:
        return self.record.question

    def runs(
        self, rungs: Mapping[str, Sequence[int]], seeds: Sequence[int], purpose: str = REPORTED
    ) -> dict[str, RunSpec]:
        """Return the runs of arms at rungs of the tuned setting by name. Seed by seed, so pairs become complete."""
        specs = (self.spec(arm, seed, rung) for seed in seeds for arm, own in rungs.items() for rung in own)
        return {spec.run_dir: replace(spec, purpose=purpose) for spec in specs}

    def spec(self, name: str, seed: int, rung: int) -> RunSpec:
        """Return the run of an arm at a seed of the question and at a rung of its tuned setting."""
        arm, by = self.arms[name], factor(rung)
        if spec := self.specs.get((name, seed, by)):  # a thousand are asked for many times, and each takes milliseconds
            return spec
        values = settings_of_run(self.record, name, arm, seed, by)
        if "init_from" in values:
            base = read_base(values["init_from"])
            values |= {"init_sha256": base.sha256, "tokenizer.path": base.tokenizer.path}
        run = change(arm.run, values)
        text = arm.text(self.question.seeds.index(seed))
        hashes = {"data_hash": text.hash, "tokenizer_hash": text.tokenizer.hash}
        identity = arm.identity | hashes
        key = json_sha256({"config": config_hash(run, **hashes), **identity})[:10]
        run_dir = f"{RUNS}/{name}-seed{run.seed}-{key}"
        run = replace(run, run_dir=str((self.reader.folder / run_dir).absolute()))
        spec = RunSpec(arm=name, seed=seed, factor=by, run_dir=run_dir, run=run, identity=identity)
        self.specs[name, seed, by] = spec
        return spec

    def status(self, run_dir: str) -> str:
        return self.reader.outcome(run_dir).status

    def is_allowed(self, arm: str, rung: int) -> bool:
        """Return whether the tuned setting may have the value of a rung, such as a fraction above one."""
        values = settings_of_run(self.record, arm, self.arms[arm], self.question.seeds[0], factor(rung))
        tuned = {key: value for key, value in values.items() if key == self.question.tuned_setting}
        try:  # the tuned setting alone: a base that cannot be read is another fault
            change(self.arms[arm].run, tuned)
        except UserError:
            return False
        return True


@dataclass(slots=True, frozen=True, eq=False)
class Stage:
    """What is to be made next, and what the outcomes that there are have decided."""

    todo: list[RunSpec]  # without an outcome, and independent of each other
    missing: list[RunSpec]  # all that are known to be needed and have no outcome, or are made again
    record: AblationRecord  # with the runs that are asked for so far
    n_open: int  # the least number of runs of ladders whose middle is not known yet


def next_runs(plan: Plan, tries: Mapping[str, int] = MappingProxyType({})) -> Stage:
    """Return the stage that follows from the outcomes.

    `tries`: how often a call has made each run that failed. Such runs are made again first, MAX_TRIES times in a call.
    Until they end otherwise, they count as failed, so a call decides what the call before it has decided.
    """
    asked = dict[str, RunSpec]()
    rungs = dict[str, Sequence[int]]()  # of the arms whose pilot has ended, those that are reported
    for name, arm in plan.arms.items():
        if not arm.is_tuned or _fails_untuned(plan, name):
            rungs[name] = [0]
            continue
        loss = partial(_pilot_loss, plan, asked, name)
        middle, unknown = pilot(loss)
        asked |= plan.runs({name: unknown}, plan.question.seeds[:PILOT_SEEDS], PILOT)
        if middle is not None:
            trains = any(loss(middle + rung) != math.inf for rung in AROUND)
            around = LADDER if trains else AROUND  # more values of an arm that does not train would not train either
            rungs[name] = [middle + rung for rung in around if plan.is_allowed(name, middle + rung)]
    n_seeds, n_now = _looks(plan, asked, rungs)
    seeds = plan.question.seeds[:n_seeds]
    asked |= plan.runs(rungs, seeds)
    status = {run_dir: plan.status(run_dir) for run_dir in asked}
    missing = [asked[run_dir] for run_dir in asked if status[run_dir] == "missing"]
    again = [
        asked[run_dir]
        for run_dir in asked
        if status[run_dir] in ("failed", "killed") and tries.get(run_dir, 0) < MAX_TRIES
    ]
    todo = again or [spec for spec in missing if spec.seed in seeds[:n_now]]
    n_of_ladder = len(LADDER) * len(seeds) - len(AROUND) * min(PILOT_SEEDS, len(seeds))  # beside what the pilot makes
    n_open_ladders = len(plan.arms) - len(rungs)
    return Stage(todo, [*again, *missing], _with_runs(plan, asked), n_of_ladder * n_open_ladders)


def _fails_untuned(plan: Plan, arm: str) -> bool:
    """Return whether a run of the pilot fails at the value of the configuration: another value mends no code."""
    return "failed" in map(plan.status, plan.runs({arm: [0]}, plan.question.seeds[:PILOT_SEEDS]))


def _pilot_loss(plan: Plan, asked: dict[str, RunSpec], arm: str, rung: int) -> float | None:
    """Return the mean loss of an arm at a rung: infinite if it does not train, None if it is not known yet."""
    if not plan.is_allowed(arm, rung):
        return math.inf
    specs = plan.runs({arm: [rung]}, plan.question.seeds[:PILOT_SEEDS], PILOT)
    status = {plan.status(run_dir) for run_dir in specs}
    if "missing" in status and not status & {"diverged", "failed"}:
        return None
    asked |= specs
    if status & {"diverged", "failed"}:
        return math.inf
    if "killed" in status:
        return None
    metric = plan.question.metric
    scores = [float(plan.reader.outcome(run_dir).result[metric]) for run_dir in specs]
    return sum(scores) / len(scores) * METRICS[metric].sign


def _looks(plan: Plan, asked: Mapping[str, RunSpec], rungs: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Return how many seeds are reported, and how many of them are made before the next decision.

    A decision waits until all runs before it have ended: a missing one could change it. A look is skipped if a run
    failed, because the runs that survived would decide, and if a run of a later seed has ended: it has passed.
    """
    question, n_seeds = plan.question, len(plan.question.seeds)
    for n in question.looks[:-1]:
        specs = plan.runs(rungs, question.seeds[:n])
        status = {plan.status(run_dir) for run_dir in specs}
        if any(plan.status(run_dir) in ENDED for run_dir in plan.runs(rungs, question.seeds[n:])):
            continue  # this look has passed
        if len(rungs) < len(plan.arms) or "missing" in status:
            return n_seeds, n
        if status <= {*ENDED}:
            record = _with_runs(plan, {**asked, **specs})
            if all(contrast.verdict != "undecided" for contrast in Results(record, plan.reader).answers()):
                return n, n
    return n_seeds, n_seeds


def _with_runs(plan: Plan, specs: Mapping[str, RunSpec]) -> AblationRecord:
    def part(kind: type, whole: Any) -> Any:
        return kind(**{item.name: getattr(whole, item.name) for item in fields(kind)})

    runs = sorted((part(Run, spec) for spec in specs.values()), key=lambda run: [*plan.arms].index(run.arm))
    return replace(plan.record, arms={name: part(ArmRecord, arm) for name, arm in plan.arms.items()}, runs=runs)


def seconds_to_go(plan: Plan, stage: Stage) -> float:
    """Return how long the busiest worker takes for what is missing; ladders whose middle is not known count too.

    Each run goes to the worker that is free first, and a run of an unknown ladder takes what an arm takes on average.
    """
    usual = fmean(arm.seconds() for arm in plan.arms.values())
    busy = [0.0] * plan.record.workers  # a heap: the worker that is free first stands first
    for seconds in [*(plan.arms[spec.arm].seconds() for spec in stage.missing), *[usual] * stage.n_open]:
        heapq.heapreplace(busy, busy[0] + seconds)
    return max(busy)


# --- from a question to its plan


def make_plan(
    config: AblateConfig,
    runs: dict[str, RunConfig],
    before: AblationRecord | None,
    reader: RunReader,
    command: str,
    default_workers: Callable[[int, bool], int],
) -> Plan:
    """Return the plan of a question.

    `runs` has the configuration of each arm, `before` the record of an earlier call; `default_workers` is asked with
    the threads of a run, and whether runs need a GPU. Raises UserError.
    """
    most_threads = max((run.threads for run in runs.values() if run.threads), default=1)
    threads = set_threads(before.threads if before else most_threads)  # of every run that does not set its own
    question = config.ablation
    seeds = [*dict.fromkeys([*(before.seeds if before else ()), *question.seeds])]  # each keeps its part of the text
    question = replace(question, seeds=[seed for seed in seeds if seed in question.seeds])
    if question.folds:
        _check_parts(question, seeds, min(run.data.n_folds for run in runs.values()), before is not None)
    folds = [question.first_fold + seeds.index(seed) for seed in question.seeds] if question.folds else [None]
    arms = build_arms(question, folds, runs, threads, before.arms if before else {})
    if question.equivalence_margin is None:
        question = replace(question, equivalence_margin=one_percent(question.metric, arms[question.baseline].texts[0]))
    if before:
        _check_earlier(reader, before, arms)
    if config.confirm:
        _check_confirmed(Path(config.confirm), arms)
    record = AblationRecord(
        question=question,
        overrides=config.overrides,
        seeds=seeds,
        begun=before.begun if before else now(),
        changed=_changes(question, arms, before, reader),
        command=command,
        started_in=os.path.relpath(os.curdir, reader.folder),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs",
        threads=threads,
        workers=config.workers or default_workers(threads, any(needs_gpu(arm.identity) for arm in arms.values())),
    )
    return Plan(arms, reader, record)


def _check_parts(question: Question, seeds: Sequence[int], n_folds: int, has_record: bool) -> None:
    """Raise UserError if the text has fewer parts than these seeds, which were ever asked, hold out."""
    needed = len(seeds) + math.ceil(question.first_fold)
    if needed <= n_folds:
        return
    n_earlier = len(seeds) - len(question.seeds)
    asked = f"{len(seeds)} seeds{f', {n_earlier} of them from earlier calls,' if n_earlier else ''}"
    elsewhere = " with another output_dir" if has_record else ""
    raise UserError(
        f"ablation.seeds: {asked} need {needed} parts of the text, and data.val_fraction makes {n_folds}; expected "
        f"data.val_fraction={1 / needed:g}{elsewhere}, or folds=false, so that all pairs share a validation text"
    )


def one_percent(metric: str, text: TextData) -> float:
    """Return the margin that is 1 % of perplexity, in the unit of the metric for the tokens of this text."""
    if metric == "val_bpb":
        return float(f"{ONE_PERCENT / math.log(2) * text.n_targets / text.val_bytes:.2g}")
    return ONE_PERCENT


def _check_earlier(reader: RunReader, before: AblationRecord, arms: Arms) -> None:
    """Refuse finished runs of an arm that has other settings or other code now, and runs of other arms alone.

    Their report would be overwritten, and their rows would never form pairs with those of the other code.
    """
    ended = Counter(run.arm for run in reader.ended(before.runs))
    other = shlex.quote(f"output_dir={sibling(reader.folder, 'new')}")
    elsewhere = f"to ask in another folder, type {other}"
    if ended and not ended.keys() & arms.keys():
        counts = ", ".join(f"{n} of {arm}" for arm, n in ended.items())
        raise UserError(f"output_dir={reader.folder}: holds finished runs of other arms ({counts}); {elsewhere}")
    for name in before.arms:
        if name in ended and name in arms and (difference := _difference(before, reader.folder, arms[name])):
            reason = f"holds finished runs of another {name} ({ended[name]}; {difference})"
            raise UserError(f"output_dir={reader.folder}: {reason}; {elsewhere}")


def _check_confirmed(source: Path, arms: Arms) -> None:
    """Refuse to confirm arms that have another text, other settings or other code than in the finished ablation."""
    first = read_record(source, "confirm")
    for name, arm in arms.items():
        data, asked = arm.run.data, first.question
        if asked.folds:  # the text without the part that the first pair held out
            data = replace(data, fold=asked.first_fold + first.seeds.index(asked.seeds[0]))
        text_hash = prepare(data, arm.run.tokenizer).hash
        same_text = text_hash == first.arms[name].identity["data_hash"]
        difference = _difference(first, source, arm) if same_text else "the text is another"
        if difference:
            raise UserError(f"confirm={source}: the arm {name} has changed ({difference}); expected the arms as asked")


def _difference(record: AblationRecord, folder: Path, arm: Arm) -> str:
    """Return in what an arm differs from the arm in the record of a folder; empty if both make the same runs."""
    before = record.arms[arm.name]
    paths = {key: before.settings[key] for key in PATHS if before.settings.get(key)}
    paths = {key: as_started(folder, record.started_in, path) for key, path in paths.items()}
    was, now = identifying(before.settings | paths), identifying(arm.settings)
    for key, content in CONTENT.items():
        hashes = {(side.settings | side.identity).get(content) for side in (before, arm)}
        if len(hashes) == 1 and None not in hashes:  # the same, wherever it lies
            was[key] = now.get(key)
    if differing := sorted(key for key in {*was, *now} if was.get(key) != now.get(key)):
        return ", ".join(f"{key} is {was.get(key)} there, {now.get(key)} now" for key in differing)
    if before.identity["source_hash"] == arm.identity["source_hash"]:
        return ""
    own = ", ".join(sorted(user_classes(arm.run.model).values()))
    cure = f"undo the change of {own}" if own else "install the version of lm that made them to go on with them"
    return f"of other code: {cure}"


def _changes(question: Question, arms: Arms, before: AblationRecord | None, reader: RunReader) -> list[int]:
    """Return after how many results the design changed, at each call that changed the design."""
    if before is None:
        return []
    n = len(reader.ended(before.runs))
    is_same = design_of(before.question, before.arms) == design_of(question, arms)
    return before.changed if is_same or not n else [*before.changed, n]


def now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="minutes")
