"""An ablation in the terminal: what is planned, and what was found."""

from collections import Counter
from pathlib import Path

from lm.ablation.ablate import AblationRunner
from lm.ablation.duration import spell
from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.looks import saved, seeds_looked_at
from lm.ablation.judge.study import Study, read_study, study_of
from lm.ablation.report.answer import BUDGET_NAMES, primary, sentences
from lm.ablation.report.overview import common_ci
from lm.ablation.report.warnings import warnings_of
from lm.ablation.seen import remember
from lm.system.terminal import format_table, printable


def plan_table(runner: AblationRunner) -> str:
    """Arms with what they cost, and how long all of it will take."""
    ablation, record = runner.ablation, runner.record()
    held = [f"tokens at equal {BUDGET_NAMES[one]}" for one in ablation.budgets]
    rows = [("arm", "parameters", "FLOPs per token", "ms per step", *held)]
    for arm in runner.arms.values():
        tokens = (f"{arm.steps[budget] * arm.tokens_per_step:,}" for budget in ablation.budgets)
        cost = (f"{arm.n_params:,}", f"{arm.flops_per_token:,}", f"{1000 * arm.seconds_per_step:.0f}")
        rows.append((arm.name, *cost, *tokens))
    cells, trials = runner.all_cells(), runner.expected_trials()
    ahead = runner.missing(cells)
    found = f"{len(cells)} runs, {len(cells) - len(ahead)} done"
    if ablation.looks:
        looks = ", ".join(map(str, ablation.looks))
        found += f", with looks at {looks} seeds"
    if trials:
        more = runner.tuning.extension() * len(ablation.tune.seeds)
        found += f"; {len(trials)} search trials"
        found += f", and {more} more if a best value lies at the edge of the search range" if more else ""
    bases = runner.missing_bases()
    if runner.bases:
        found = f"{len(runner.base_seeds())} base runs, one for each seed, {len(bases)} to be made; {found}"
    seconds = sum(map(runner.cost, [*bases, *ahead, *trials])) / runner.workers
    lines = [ablation.question, "", format_table(rows), ""]
    lines += [f"{found}; {record.workers} at a time, {record.threads} thread{'s' * (record.threads > 1)} each"]
    study = study_of(record, runner.outcomes)
    if stop := saved(study):
        lines += [stop]
    if alone := study.rows_alone():
        lines += [f"finished runs without a folder, read from results.csv: {alone}; remove a row to run one again"]
    lines += [*no_longer_count(record.set_aside), *(f"{head} {meaning}" for head, meaning in record.cautions)]
    lines += [f"about {spell(seconds)} to go, as measured on this machine; all goes to {runner.path}"]
    return printable("\n".join(lines))


def no_longer_count(reasons: dict[str, str]) -> list[str]:
    """A line for each reason why finished runs in the folder are not used."""
    counts = Counter(reasons.values()).items()
    return [f"{n} finished run{'s' * (n > 1)} in this folder no longer count: {why}" for why, n in counts]


def result_table(path: Path) -> str:
    """The comparisons, their verdicts in words, and where the report lies."""
    study = read_study(path)
    contrasts = study.contrasts()
    interactions = study.interactions()
    remember(path, study.record, seeds_looked_at(study, primary(contrasts)))
    lines = [format_table([heads(study.ci), *map(row, [*contrasts, *interactions])]), ""]
    lines += sentences(study, [*(one for one in contrasts if one.primary), *interactions])
    lines += [stop] if (stop := saved(study)) else []
    lines += [f"{head} {meaning}" for head, meaning in warnings_of(study, contrasts)]
    lost = [one for one in study.rows if one.status in ("failed", "diverged")]
    lines += [f"{one.status}: {one.run_dir} ({one.error})" for one in lost]
    counts = ", ".join(f"{n} {kind}" for kind, n in study.counts().items() if n)
    if alone := study.rows_alone():
        counts += f" ({alone} of them rows of results.csv without their folder)"
    return printable("\n".join([*lines, "", f"{counts}; {path / 'report.html'}"]))


def overview_table(path: Path, studies: dict[Path, Study]) -> str:
    """The primary comparisons of several ablations, each in its own unit, and where the whole overview lies."""
    ci, rows = common_ci(studies.values()), []
    for folder, study in studies.items():
        level = f" ({study.ci})" * (study.ci != ci)
        rows += [(folder.name, *row(one, level)) for one in primary(study.contrasts())]
    return f"{format_table([('ablation', *heads(ci)), *rows])}\n\n{len(studies)} ablations; {path / 'overview.md'}"


HEAD = ("arm", "baseline", "budget", "seeds", "difference", "CI", "verdict")


def heads(ci: str) -> tuple[str, ...]:
    return tuple(ci if head == "CI" else head for head in HEAD)


def row(one: Contrast, level: str = "") -> tuple[str, ...]:
    """`level` is added to the interval."""
    found = one.comparison
    mean = "" if found.mean is None else f"{found.mean:+.4f}"
    interval = "" if found.ci_low is None else f"{found.ci_low:+.4f} to {found.ci_high:+.4f}{level}"
    return (one.arm, one.baseline, one.budget, str(found.n), mean, interval, found.verdict)
