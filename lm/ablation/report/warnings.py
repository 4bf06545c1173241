"""What weakens the answer: for each weakness a sentence that names it and one that says what it means."""

from collections.abc import Sequence

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.study import Study
from lm.ablation.record import Caution
from lm.ablation.report.answer import primary
from lm.ablation.report.conditions import mixed
from lm.ablation.report.run_warnings import losses, progress, unequal, unused, without_curve
from lm.ablation.report.verdict_warnings import edges, fading, few_trials, rising, shape, small, unlike_trials, untuned
from lm.report.page import plain


def warnings_list(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    lines = (f"- **{plain(head)}** {plain(meaning)}" for head, meaning in warnings_of(study, contrasts))
    return ["\n".join(lines)]


def warnings_of(study: Study, contrasts: Sequence[Contrast]) -> list[Caution]:
    asked, planned, interactions = primary(contrasts), study.record.cautions, study.interactions()
    about_runs = [*progress(study), *unused(study), *losses(study), *without_curve(study), *untuned(study)]
    about_curves = [*fading(study, asked), *rising(study)]
    about_differences = [*small(study, asked), *shape(study, [*asked, *interactions])]
    about_trials = [
        *edges(study),
        *few_trials(study, [*contrasts, *interactions]),
        *unlike_trials(study, asked),
    ]
    about_conditions = [*unequal(study, asked), *mixed(study, contrasts)]
    return [*about_runs, *planned, *about_trials, *about_differences, *about_curves, *about_conditions]
