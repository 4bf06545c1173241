"""What a reader must know before believing the answer: a few bold words to stop at, and what they mean."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from lm.ablation.judge.sentence import decimals
from lm.ablation.judge.statistics import interval
from lm.ablation.judge.study import Contrast, Study
from lm.ablation.record import Caution
from lm.ablation.report.answer import BUDGET_NAMES, primary
from lm.ablation.report.curves import FILE, column, halfway, mean_curves
from lm.ablation.report.page import plain
from lm.ablation.report.tuning import best_trial

SAME_TIME = 0.1  # runs at equal time whose measured times differ by more did not have equal time
FEW = 4  # seeds; with fewer, one more often turns a verdict
PLACE = ("device", "threads", "precision", "python")
OTHERS = "the settings, the text or the training code were others"
LOST = {
    "diverged": "Its seed is left out of the comparisons, and nothing good is concluded from the rest.",
    "failed": "Its seed is left out of the comparisons until the same command has run it again.",
}
EDGES = {  # what a search says of a setting -> how that is told
    False: ("The best value lies at the edge of what was tried", "There may be better ones beyond."),
    None: ("Not varied", "Too few trials for so many settings; whatever suits these arms there is luck."),
}


def warnings_list(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    lines = (f"- **{plain(head)}** {plain(meaning)}" for head, meaning in warnings_of(study, contrasts))
    return ["\n".join(lines)]


def warnings_of(study: Study, contrasts: Sequence[Contrast]) -> list[Caution]:
    asked, planned = primary(contrasts), study.record.cautions
    about_runs = [*progress(study), *unused(study), *losses(study), *without_curve(study), *untuned(study)]
    about_curves = [*fading(study, asked), *rising(study)]
    about_trials = [*edges(study), *unlike_trials(study, asked)]
    return [*about_runs, *planned, *about_trials, *small(study, asked), *about_curves, *unequal(study, asked)]


def progress(study: Study) -> Iterator[Caution]:
    counts = study.counts()
    done, n = f"{counts['done']} of {len(study.rows)} runs are done: provisional.", len(study.record.seeds)
    if counts["missing"]:
        yield Caution(done, "Verdicts can still change.")
    if n == 1:
        yield Caution("One seed decides nothing:", "there is no interval without a second one.")
    elif n < FEW:
        yield Caution(f"Only {n} seeds:", "take a verdict as a hint; the standard deviation is a rough estimate then.")
    if study.record.tune.trials and not study.record.tuning_done:
        yield Caution("Tuning is not finished.", "The runs that are missing wait for it.")


def unused(study: Study) -> Iterator[Caution]:
    """Finished runs of other seeds: whoever takes seeds away after seeing them can have any verdict."""
    rows = [row for row in study.unused() if row.result and row.run_dir.startswith("cells/")]
    known = {(row.arm, row.seed) for row in study.rows}
    if seeds := sorted({(row.arm, row.seed) for row in rows} - known):
        names = ", ".join(f"{arm} seed {seed}" for arm, seed in seeds)
        yield Caution(f"Finished but left out: {names}.", "A verdict that was reached by leaving runs out is none.")
    if others := [row.run_dir for row in rows if (row.arm, row.seed) in known]:
        reasons = dict.fromkeys(study.record.set_aside.get(run_dir, OTHERS) for run_dir in others)
        many = "s are" if len(others) > 1 else " is"
        yield Caution(f"{len(others)} finished run{many} not used:", f"{'; '.join(reasons)}.")


def losses(study: Study) -> Iterator[Caution]:
    for kind, meaning in LOST.items():
        rows = [row for row in study.rows if row.status == kind]
        arms = ", ".join(dict.fromkeys(row.arm for row in rows))
        if rows:
            yield Caution(f"{len(rows)} run{'s' * (len(rows) > 1)} {kind} ({arms}).", meaning)


def without_curve(study: Study) -> Iterator[Caution]:
    """Runs of which neither metrics.csv nor rows of curves.csv are left."""
    if n := sum(bool(row.result) and not study.lines(row, "metrics.csv") for row in study.rows):
        yield Caution(f"The curves of {n} runs are not here,", "so whether a lead shrinks cannot be told.")


def untuned(study: Study) -> Iterator[Caution]:
    for arm, trials in study.record.untuned.items():
        named = ", ".join(f"{trial}.log" for trial in trials)
        yield Caution(f"{arm} could not be tuned:", f"a trial failed ({named}). The same command tries it again.")


def edges(study: Study) -> Iterator[Caution]:
    for lies, (head, meaning) in EDGES.items():
        searches = study.searches.items()
        outer = {arm: [key for key, where in one.inside.items() if where is lies] for arm, one in searches}
        if named := "; ".join(f"{arm} ({', '.join(keys)})" for arm, keys in outer.items() if keys):
            yield Caution(f"{head}: {named}.", meaning)


def unlike_trials(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    """A lead that matters, where the best trials of the two show none that does, and less by as much."""
    margin, digits = study.record.equivalence_margin, decimals(study.record.equivalence_margin)
    for one, lead in decided(asked, study.record.budgets[0]):
        best = [best_trial(study, study.searches[arm]) for arm in (one.arm, one.baseline) if arm in study.searches]
        if len(values := [trial.score for trial in best if trial and trial.score is not None]) < 2:
            continue
        apart = values[0] - values[1]
        shown = math.copysign(1, lead) * apart
        if abs(lead) >= margin > shown and abs(lead) - shown >= margin:
            yield Caution(
                f"Not so clear among the trials{at(study, one)}:",
                f"{one.arm} minus {one.baseline} is {apart:+.{digits}f} between their best ones. Settings that suit a "
                "seed by chance do this: ask with more ablation.tune.seeds.",
            )


def small(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    """A difference that is there need not be one that matters."""
    margin = study.record.equivalence_margin
    for one, _ in decided(asked):
        if min(abs(one.comparison.ci_low or 0), abs(one.comparison.ci_high or 0)) < margin:
            said = f"{one.arm} and {one.baseline} may differ by less than {margin:g}{at(study, one)}."
            yield Caution("Perhaps too small to matter:", said)


def fading(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    """A lead that shrinks from half of training to its end so fast that as much again would leave none that matters.

    A hint: halfway a run is not what a run of half the steps ends as, for its learning rate is still high.
    """
    margin, digits = study.record.equivalence_margin, decimals(study.record.equivalence_margin)
    for one, lead in decided(asked, study.record.budgets[0]):
        if not (pairs := halfway(study, one.arm, one.baseline)):
            continue
        before, now = map(fmean, zip(*pairs, strict=True))
        low, high = interval([end - half for half, end in pairs]) or (0, 0)
        shrinks = low > 0 if lead < 0 else high < 0
        if shrinks and margin <= abs(lead) < margin + abs(now - before):
            leader = one.arm if one.comparison.verdict == "better" else one.baseline
            yield Caution(
                f"The lead of {leader} shrinks{at(study, one)}:",
                f"during training {one.arm} minus {one.baseline} went from {before:+.{digits}f}, halfway, to "
                f"{now:+.{digits}f}. Longer training may answer otherwise: ask with twice the steps.",
            )


def rising(study: Study) -> Iterator[Caution]:
    """Arms that were better before the end, as models are that see a small text too often."""
    curves = mean_curves(study, FILE, column(study)) if study.lower_is_better else {}
    rises = {arm: curve[max(curve)][0] - min(mean for mean, _, _ in curve.values()) for arm, curve in curves.items()}
    margin = study.record.equivalence_margin
    if named := ", ".join(f"{arm} (by {rise:.2g})" for arm, rise in rises.items() if rise > margin):
        yield Caution(f"Better before the end: {named}.", "Who overfits least is told here, not who can learn most.")


def unequal(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    for one in asked:
        if one.budget == "time" and one.seeds:
            ours, theirs = (study.scores(arm, "time", "seconds").values() for arm in (one.arm, one.baseline))
            ratio = median(ours) / median(theirs)
            if abs(ratio - 1) > SAME_TIME:
                yield Caution("Equal time was missed:", f"{one.arm} took {ratio:.2f} times as long as {one.baseline}.")
    done = [row.result for row in study.rows if row.result]
    places = {(*(str(one[key]) for key in PLACE), one["versions"]["torch"]) for one in done}
    if len(places) > 1:
        yield Caution("Runs differ in device, threads, precision or versions:", "results.csv says which.")


def decided(asked: Sequence[Contrast], budget: str | None = None) -> Iterator[tuple[Contrast, float]]:
    """Comparisons with a difference that was shown, of one budget or of all, and that difference."""
    for one in asked:
        if one.comparison.verdict in ("better", "worse") and budget in (None, one.budget):
            yield one, one.comparison.mean or 0.0


def at(study: Study, one: Contrast) -> str:
    return f" at equal {BUDGET_NAMES[one.budget]}" if len(study.record.budgets) > 1 else ""
