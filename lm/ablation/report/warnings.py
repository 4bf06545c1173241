"""What a reader must know before believing the answer: a few bold words to stop at, and what they mean."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from lm.ablation.judge.sentence import decimals
from lm.ablation.judge.statistics import interval
from lm.ablation.judge.study import Contrast, Study
from lm.ablation.report.answer import BUDGET_NAMES, primary
from lm.ablation.report.curves import FILE, column, halfway, mean_curves
from lm.ablation.report.page import plain
from lm.ablation.report.tuning import best_trial

SAME_TIME = 0.1  # runs at equal time whose measured times differ by more did not have equal time
FEW = 4  # seeds; with fewer, one more often turns a verdict
PLACE = ("device", "threads", "precision", "python")


def warnings_list(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    lines = (f"- **{plain(head)}** {plain(meaning)}" for head, meaning in warnings_of(study, contrasts))
    return ["\n".join(lines)]


def warnings_of(study: Study, contrasts: Sequence[Contrast]) -> list[tuple[str, str]]:
    asked, planned = primary(contrasts), map(tuple, study.record["cautions"])
    about_runs = [*progress(study), *unused(study), *losses(study), *restored(study), *untuned(study)]
    about_curves = [*fading(study, asked), *rising(study)]
    about_trials = [*edges(study), *unlike_trials(study, asked)]
    return [*about_runs, *planned, *about_trials, *small(study, asked), *about_curves, *unequal(study, asked)]


def progress(study: Study) -> Iterator[tuple[str, str]]:
    counts = study.counts()
    if counts["missing"]:
        yield f"{counts['done']} of {len(study.rows)} runs are done: provisional.", "Verdicts can still change."
    if len(study.record["seeds"]) == 1:
        yield "One seed decides nothing:", "there is no interval without a second one."
    if 1 < len(study.record["seeds"]) < FEW:
        n = len(study.record["seeds"])
        yield f"Only {n} seeds:", "take a verdict as a hint; the spread, and so the interval, is a guess itself."
    if study.record["tune"]["trials"] and not study.record["tuning_done"]:
        yield "Tuning is not finished.", "The runs that are missing wait for it."


def unused(study: Study) -> Iterator[tuple[str, str]]:
    """Finished runs of other seeds: whoever takes seeds away after seeing them can have any verdict."""
    found = [(row.arm, row.seed) for row in study.unused()]
    known = {(row.arm, row.seed) for row in study.rows}
    if seeds := sorted({(arm, seed) for arm, seed in found if (arm, seed) not in known}):
        names = ", ".join(f"{arm} seed {seed}" for arm, seed in seeds)
        yield f"Finished but left out: {names}.", "A verdict that was reached by leaving runs out is none."
    if (n := sum(one in known for one in found)) == 1:
        yield "1 finished run here is not used:", "its settings, text or training code were others."
    elif n:
        yield f"{n} finished runs here are not used:", "their settings, text or training code were others."


def losses(study: Study) -> Iterator[tuple[str, str]]:
    for kind, meaning in (
        (
            "diverged",
            "Its seed is left out of the contrasts, and nothing good is concluded from the rest.",
        ),
        ("failed", "Its seed is left out of the contrasts until the same command has run it again."),
    ):
        rows = [row for row in study.rows if row.status == kind]
        arms = ", ".join(dict.fromkeys(row.arm for row in rows))
        if rows:
            yield f"{len(rows)} run{'s' * (len(rows) > 1)} {kind} ({arms}).", meaning


def restored(study: Study) -> Iterator[tuple[str, str]]:
    """Runs of which results.csv alone was left."""
    if n := sum(bool(row.result) and not (study.path / row.run_dir / "metrics.csv").exists() for row in study.rows):
        yield f"The curves of {n} runs are not here,", "so whether a lead shrinks cannot be told."


def untuned(study: Study) -> Iterator[tuple[str, str]]:
    for arm, trials in study.record["untuned"].items():
        named = ", ".join(f"{trial}.log" for trial in trials)
        yield f"{arm} could not be tuned:", f"a trial came to no end ({named}). The same command tries it again."


def edges(study: Study) -> Iterator[tuple[str, str]]:
    for lies, head, meaning in (
        (False, "The best value lies at the edge of what was tried", "There may be better ones beyond."),
        (None, "Not varied", "Too few trials for so many settings; whatever suits these arms there is luck."),
    ):
        outer = {
            arm: [setting for setting, where in one["inside"].items() if where is lies]
            for arm, one in study.searches.items()
        }
        if named := "; ".join(
            f"{arm} ({', '.join(hyperparameters)})" for arm, hyperparameters in outer.items() if hyperparameters
        ):
            yield f"{head}: {named}.", meaning


def unlike_trials(study: Study, asked: Sequence[Contrast]) -> Iterator[tuple[str, str]]:
    """A lead that matters, where the best trials of the two show none that does, and less by as much."""
    margin, digits = study.record["equivalence_margin"], decimals(study.record["equivalence_margin"])
    for one in asked:
        lead, arms = one.comparison.mean, (one.arm, one.baseline)
        if one.budget != study.record["budgets"][0] or one.comparison.verdict not in ("better", "worse") or not lead:
            continue
        best = [best_trial(study, study.searches[arm]) for arm in arms if arm in study.searches]
        if len(values := [float(trial[study.metric]) for trial in best if trial]) < 2:
            continue
        apart = values[0] - values[1]
        shown = math.copysign(1, lead) * apart
        if abs(lead) >= margin > shown and abs(lead) - shown >= margin:
            yield (
                f"Not so clear among the trials{at(study, one)}:",
                f"{one.arm} minus {one.baseline} is {apart:+.{digits}f} between their best ones. Settings that suit a "
                "seed by chance do this: ask with more ablation.tune.seeds.",
            )


def small(study: Study, asked: Sequence[Contrast]) -> Iterator[tuple[str, str]]:
    """A difference that is there need not be one that matters."""
    margin = study.record["equivalence_margin"]
    for one in asked:
        low, high = one.comparison.ci_low, one.comparison.ci_high
        if one.comparison.verdict not in ("better", "worse") or low is None or high is None:
            continue
        if min(abs(low), abs(high)) < margin:
            names = f"{one.arm} and {one.baseline}"
            yield (
                "Perhaps too small to matter:",
                f"{names} may differ by less than {margin:g}{at(study, one)}.",
            )


def fading(study: Study, asked: Sequence[Contrast]) -> Iterator[tuple[str, str]]:
    """A lead that shrinks from half of training to its end so fast that as much again would leave none that matters.

    A hint: halfway a run is not what a run of half the steps ends as, for its rate is still high.
    """
    margin, digits = study.record["equivalence_margin"], decimals(study.record["equivalence_margin"])
    for one in asked:
        if one.budget != study.record["budgets"][0] or one.comparison.verdict not in ("better", "worse"):
            continue
        if not (pairs := halfway(study, one.arm, one.baseline)):
            continue
        lead, (before, now) = one.comparison.mean or 0, map(fmean, zip(*pairs, strict=True))
        low, high = interval([end - half for half, end in pairs]) or (0, 0)
        shrinks = low > 0 if lead < 0 else high < 0
        if shrinks and margin <= abs(lead) < margin + abs(now - before):
            leader = one.arm if one.comparison.verdict == "better" else one.baseline
            yield (
                f"The lead of {leader} shrinks{at(study, one)}:",
                f"during training {one.arm} minus {one.baseline} went from {before:+.{digits}f}, halfway, to "
                f"{now:+.{digits}f}. Longer training may answer otherwise: ask with twice the steps.",
            )


def rising(study: Study) -> Iterator[tuple[str, str]]:
    """Arms that were better before the end, as models are that see a small text too often."""
    curves = mean_curves(study, FILE, column(study)) if study.lower_is_better else {}
    rises = {arm: curve[max(curve)][0] - min(mean for mean, _, _ in curve.values()) for arm, curve in curves.items()}
    if named := ", ".join(
        f"{arm} (by {rise:.2g})" for arm, rise in rises.items() if rise > study.record["equivalence_margin"]
    ):
        yield f"Better before the end: {named}.", "Who overfits least is told here, not who can learn most."


def unequal(study: Study, asked: Sequence[Contrast]) -> Iterator[tuple[str, str]]:
    for one in asked:
        if one.budget == "time" and one.seeds:
            ours, theirs = (study.scores(arm, "time", "seconds").values() for arm in (one.arm, one.baseline))
            ratio = median(ours) / median(theirs)
            if abs(ratio - 1) > SAME_TIME:
                yield "Equal time was missed:", f"{one.arm} took {ratio:.2f} times as long as {one.baseline}."
    done = [row.result for row in study.rows if row.result]
    places = {(*(str(one[key]) for key in PLACE), one["versions"]["torch"]) for one in done}
    if len(places) > 1:
        yield "Runs differ in device, threads, precision or versions:", "results.csv says which."


def at(study: Study, one: Contrast) -> str:
    return f" at equal {BUDGET_NAMES[one.budget]}" if len(study.record["budgets"]) > 1 else ""
