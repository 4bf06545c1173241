"""Planned looks at an ablation: which one the runs have reached, whether it decides, and what a stop saves."""

from collections.abc import Sequence
from dataclasses import replace

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.study import Study
from lm.ablation.record import first_seeds
from lm.system.terminal import duration as spell

ENDED = ("done", "diverged")


def seeds_looked_at(study: Study, asked: Sequence[Contrast]) -> list[int]:
    """The seeds that a verdict rests on: of a planned look all, else those on which all arms of one of `asked` ended.

    A run that diverged has ended, and may be what the verdict rests on.
    """
    if n := look_now(study):
        return study.record.seeds[:n]
    ended, seeds = {(row.arm, row.seed) for row in study.rows if row.status in ENDED}, study.record.seeds
    return [seed for seed in seeds if any(all((arm, seed) in ended for arm in one.weights) for one in asked)]


def look_now(study: Study) -> int | None:
    """The planned look that the runs have reached: all of its seeds have ended, and none after them."""
    ended = {row.seed for row in study.rows if row.status in ENDED}
    open_ones = {row.seed for row in study.rows if row.status not in ENDED}
    for n in study.record.looks:
        first = study.record.seeds[:n]
        if ended <= {*first} and not open_ones & {*first}:
            return n
    return None


def decides(study: Study, n: int) -> bool:
    """Whether everything that is asked is decided by the first n seeds."""
    first = first_seeds(study.record, n)
    now = replace(study, record=first, rows=[row for row in study.rows if row.seed in first.seeds])
    contrasts = now.contrasts()
    asked = [one for one in contrasts if one.primary] or contrasts
    return all(one.comparison.verdict != "undecided" for one in [*asked, *now.interactions()])


def saved(study: Study) -> str:
    """What was not made because a planned look decided; empty if nothing was."""
    n, looks = len(study.record.seeds), study.record.looks
    if not looks or n >= looks[-1]:
        return ""
    left = len(study.rows) * (looks[-1] - n) // n
    seconds = [float(row.result["seconds"]) for row in study.rows if row.result]
    took = spell(left * sum(seconds) / max(1, len(seconds)) / study.record.workers)
    return f"decided with {n} of {looks[-1]} seeds: {left} runs, about {took}, were not made"
