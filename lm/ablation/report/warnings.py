"""What weakens the answer: for each weakness a sentence that names it and one that says what it means."""

from collections.abc import Iterator, Sequence
from statistics import median

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.study import Study
from lm.ablation.outcomes import AGAIN, CHANGED, CHECKED, WHO
from lm.ablation.record import Caution
from lm.ablation.report.answer import primary
from lm.ablation.report.arms import ratios_of_time
from lm.ablation.report.conditions import mixed
from lm.ablation.report.diagnostics import FILE as DIAGNOSTICS
from lm.ablation.report.verdict_warnings import edges, fading, few_trials, rising, shape, small, unlike_trials, untuned
from lm.ablation.seen import FILE as LOOKS
from lm.ablation.seen import written
from lm.report.metrics import FILE as METRICS
from lm.report.page import plain
from lm.system.table import harmless

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
    about_runs = [*progress(study), *unused(study), *losses(study), *changed(study), *without_curve(study)]
    about_runs += [*damaged(study), *changed_columns(study), *changed_looks(study), *untuned(study)]
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


def changed(study: Study) -> Iterator[Caution]:
    """Rows of results.csv that were changed so that they stand for no run."""
    known = {row.run_dir for row in (*study.rows, *study.trials)}
    for row in (row for run_dir, row in study.outcomes.rows.items() if run_dir not in known):
        if CHANGED in row.error:
            yield Caution(
                f"{row.error.removesuffix(f'; {AGAIN}')}.", "It is the row of no run that the ablation asks for."
            )


def without_curve(study: Study) -> Iterator[Caution]:
    """Runs whose metrics.csv and rows of curves.csv are absent or, as another warning then says, damaged."""
    if n := sum(bool(row.result) and not study.lines(row, METRICS) for row in study.rows):
        said = (
            "Neither a metrics.csv nor rows in curves.csv can be used. Whether a difference shrinks cannot be checked."
        )
        yield Caution(f"{n} run{'s have' if n > 1 else ' has'} no learning curve.", said)


def damaged(study: Study) -> Iterator[Caution]:
    """Files of curves, or of where runs were made, that cannot be read or are not what was written."""
    unused = study.unused()
    for row in (*study.rows, *unused):
        for name in (METRICS, DIAGNOSTICS):
            study.lines(row, name)
    for row in (one for one in (*study.rows, *study.trials, *unused) if one.result and not one.row):
        study.outcomes.where(row.run_dir)
    for path, what in study.outcomes.damaged.items():
        lost = "results.csv does not say where this run was made. No verdict rests on it."
        left = "The report shows what is left of the curves. No verdict rests on them."
        yield Caution(f"{what}.", lost if path.suffix == ".where" else left)


def changed_columns(study: Study) -> Iterator[Caution]:
    """Columns of results.csv that are neither its own nor settings, in rows that are written as they were read."""
    record, every = study.record, (*study.rows, *study.trials, *study.unused())
    anew = {row.run_dir for row in every if row.result and not row.row}
    read = {key for run_dir, one in study.outcomes.rows.items() if run_dir not in anew for key in one.row or ()}
    settings = {key for arm in record.arms.values() for key in (*arm.settings, *arm.tuned)}
    settings |= {key for one in record.searches.values() for trial in one.trials for key in trial.values}
    if others := sorted(read - {*WHO, *CHECKED, "row_hash", *map(harmless, settings)}):
        said = f"{study.outcomes.folder / 'results.csv'}: has a column {others[0]}, expected settings of this ablation"
        yield Caution(f"{said}; restore the file, or give the column its name.", "No verdict rests on it.")


def changed_looks(study: Study) -> Iterator[Caution]:
    _, lines = written(study.outcomes.folder)
    if lines:
        said = f"{study.outcomes.folder / LOOKS}: line {lines[0]} is not what was written"
        head = f"{said}; restore the file, or remove the line."
        yield Caution(head, "How often verdicts were seen, and on which seeds, is then not known for certain.")


def unequal(study: Study, asked: Sequence[Contrast]) -> Iterator[Caution]:
    for one in (each for each in asked if each.budget == "time"):
        ratios = ratios_of_time(study, one.arm, one.baseline, one.budget)
        if ratios and abs(median(ratios) - 1) > SAME_TIME:
            said = f"{one.arm} took {median(ratios):.3f} times as long as {one.baseline}"
            span = f" (median of {len(ratios)} pairs: {min(ratios):.2f} to {max(ratios):.2f})" * (len(ratios) > 1)
            meaning = "A step was measured before the runs; other load during them changes what it takes."
            yield Caution(f"Training times at equal time differ by more than 2 %: {said}{span}.", meaning)
