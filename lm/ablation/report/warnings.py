"""What weakens the answer: for each weakness a sentence that names it and one that says what it means."""

from collections.abc import Iterator, Sequence
from statistics import median

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.study import Study
from lm.ablation.record import Caution
from lm.ablation.report.answer import primary
from lm.ablation.report.arms import ratios_of_time
from lm.ablation.report.conditions import mixed
from lm.ablation.report.verdict_warnings import edges, fading, few_trials, rising, shape, small, unlike_trials, untuned
from lm.report.metrics import FILE as METRICS
from lm.report.page import plain

SAME_TIME = 0.02  # runs at equal time whose measured times differ by more did not have equal time
FEW = 4  # seeds; with fewer, one more often changes a verdict
OTHERS = "the settings, the text or the training code were different"
LOST = {
    "diverged": "Comparisons leave its seed out, and an arm that diverged is never called better or equivalent.",
    "failed": "Comparisons leave its seed out until ablate has repeated the run, and meanwhile an arm that "
    "failed, unless it was killed, is never called better or equivalent.",
}


def warnings_list(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    lines = (f"- **{plain(head)}** {plain(meaning)}" for head, meaning in warnings_of(study, contrasts))
    return ["\n".join(lines)]


def warnings_of(study: Study, contrasts: Sequence[Contrast]) -> list[Caution]:
    asked, planned, interactions = primary(contrasts), study.record.cautions, study.interactions()
    about_runs = [*progress(study), *unused(study), *losses(study), *without_curve(study), *untuned(study)]
    about_curves = [*fading(study, asked), *rising(study)]
    about_differences = [*small(study, asked), *shape(study, [*asked, *interactions])]
    about_trials = [*edges(study), *few_trials(study, [*contrasts, *interactions]), *unlike_trials(study, asked)]
    about_conditions = [*unequal(study, asked), *mixed(study, contrasts)]
    return [*about_runs, *planned, *about_trials, *about_differences, *about_curves, *about_conditions]


def progress(study: Study) -> Iterator[Caution]:
    counts = study.counts()
    n = len(study.record.seeds)
    if counts["missing"]:
        yield Caution(f"{counts['done']} of {len(study.rows)} runs are done.", "Verdicts can still change.")
    if n == 1:
        yield Caution("There is only one seed.", "A confidence interval and a verdict need at least two.")
    elif n < FEW:
        head = f"Only {n} seeds are planned." if counts["missing"] else f"There are only {n} seeds."
        yield Caution(head, "Their standard deviation is a rough estimate: a verdict is a hint.")
    if study.record.tune.trials and not study.record.tuning_done:
        yield Caution("Tuning is not finished.", "The missing runs wait for it.")


def unused(study: Study) -> Iterator[Caution]:
    """Finished runs of other seeds: taking seeds away after seeing their results can produce any verdict."""
    rows = [row for row in study.unused() if row.result and row.run_dir.startswith("cells/")]
    known = {(row.arm, row.seed) for row in study.rows}
    if seeds := sorted({(row.arm, row.seed) for row in rows} - known):
        names = ", ".join(f"{arm} seed {seed}" for arm, seed in seeds)
        yield Caution(f"Finished runs are left out: {names}.", "Leaving runs out can change a verdict.")
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
    """Runs whose metrics.csv and rows of curves.csv are absent."""
    if n := sum(bool(row.result) and not study.lines(row, METRICS) for row in study.rows):
        said = "There is no metrics.csv and no row in curves.csv. Whether a difference shrinks cannot be checked."
        yield Caution(f"{n} run{'s have' if n > 1 else ' has'} no learning curve.", said)


def unequal(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    for one in (each for each in asked if each.budget == "time"):
        ratios = ratios_of_time(study, one.arm, one.baseline, one.budget)
        if ratios and abs(median(ratios) - 1) > SAME_TIME:
            said = f"{one.arm} took {median(ratios):.3f} times as long as {one.baseline}"
            span = f" (median of {len(ratios)} pairs: {min(ratios):.2f} to {max(ratios):.2f})" * (len(ratios) > 1)
            meaning = "A step was measured before the runs; other load during them changes what it takes."
            yield Caution(f"Training times at equal time differ by more than 2 %: {said}{span}.", meaning)
