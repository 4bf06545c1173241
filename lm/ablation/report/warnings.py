"""What weakens the answer: for each weakness a sentence that names it and one that says what it means."""

from collections.abc import Sequence

from lm.ablation.judge.study import Contrast, Study
from lm.ablation.record import Caution
from lm.ablation.report.answer import primary
from lm.ablation.report.run_warnings import losses, progress, unequal, unused, without_curve
from lm.ablation.report.verdict_warnings import edges, fading, few_trials, rising, small, unlike_trials, untuned
from lm.report.page import plain


def warnings_list(study: Study, contrasts: Sequence[Contrast]) -> list[str]:
    lines = (f"- **{plain(head)}** {plain(meaning)}" for head, meaning in warnings_of(study, contrasts))
    return ["\n".join(lines)]


def warnings_of(study: Study, contrasts: Sequence[Contrast]) -> list[Caution]:
    asked, planned = primary(contrasts), study.record.cautions
    about_runs = [*progress(study), *unused(study), *losses(study), *without_curve(study), *untuned(study)]
    about_curves = [*fading(study, asked), *rising(study)]
    about_trials = [*edges(study), *few_trials(study, contrasts), *unlike_trials(study, asked)]
    return [*about_runs, *planned, *about_trials, *small(study, asked), *about_curves, *unequal(study, asked)]
