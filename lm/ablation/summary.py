"""An ablation in the terminal: what is planned, and what was found."""

from pathlib import Path

from lm.ablation.ablate import Laboratory
from lm.ablation.judge.study import Contrast, Study, read_study
from lm.ablation.report.warnings import warnings_of
from lm.ablation.run.progress import spell
from lm.ablation.run.workers import missing
from lm.system.table import table


def plan_table(laboratory: Laboratory) -> str:
    """Arms with what they cost, and how long all of it will take."""
    ablation = laboratory.ablation
    rows = [
        ("arm", "parameters", "FLOPs per token", "ms per step", *(f"tokens at equal {one}" for one in ablation.budgets))
    ]
    for arm in laboratory.arms.values():
        tokens = (f"{arm.steps[budget] * arm.tokens_per_step:,}" for budget in ablation.budgets)
        cost = (f"{arm.n_params:,}", f"{arm.flops_per_token:,}", f"{1000 * arm.seconds_per_step:.0f}")
        rows.append((arm.name, *cost, *tokens))
    cells, trials = laboratory.all_cells(), laboratory.expected_trials()
    open_cells = missing(cells, laboratory.path / "cells")
    seconds = sum(map(laboratory.cost, [*open_cells, *trials])) / laboratory.workers
    found = f"{len(cells)} runs, {len(cells) - len(open_cells)} of them done"
    if trials:
        more = ablation.tune.extension_trials * len(ablation.tune.seeds) * len(laboratory.arms)
        found += f"; {len(trials)} trials, and {more} more if a best value lies at the edge of what was tried"
    return "\n".join(
        [
            ablation.question,
            "",
            table(rows),
            "",
            f"{found}; {laboratory.workers} at a time, {laboratory.threads} thread each",
            *(f"{head} {meaning}" for head, meaning in laboratory.cautions()),
            f"about {spell(seconds)} to go, by steps measured on this machine; all goes to {laboratory.path}",
        ]
    )


def result_table(path: Path) -> str:
    """The contrasts, what they say, and where the report lies."""
    study = read_study(path)
    contrasts = study.contrasts()
    lines = [table([HEAD, *(row(one) for one in contrasts)]), ""]
    lines += [say(study, one) for one in contrasts if one.primary]
    lines += [f"{head} {meaning}" for head, meaning in warnings_of(study, contrasts)]
    lost = [one for one in study.rows if one.status in ("failed", "diverged")]
    lines += [f"{one.status}: {one.run_dir} ({one.error})" for one in lost]
    counts = ", ".join(f"{n} {kind}" for kind, n in study.counts().items() if n)
    return "\n".join([*lines, "", f"{counts}; {path / 'report.html'}"])


HEAD = ("arm", "against", "budget", "seeds", "difference", "95 % interval", "verdict")


def row(one: Contrast) -> tuple[str, ...]:
    found = one.comparison
    mean = "" if found.mean is None else f"{found.mean:+.4f}"
    interval = "" if found.ci_low is None else f"{found.ci_low:+.4f} to {found.ci_high:+.4f}"
    return (one.arm, one.baseline, one.budget, str(found.n), mean, interval, found.verdict)


def say(study: Study, one: Contrast) -> str:
    budget = f"At equal {one.budget}: " if len(study.record["budgets"]) > 1 else ""
    return budget + study.say(one)
