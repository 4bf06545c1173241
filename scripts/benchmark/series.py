"""What a series of questions keeps, by simulation: the table in docs/statistics.md.

    python scripts/benchmark/series.py [repetitions]

A hundred changes are asked one by one, of which some are better by EFFECT standard deviations of a difference and the
others do nothing. A rule keeps a change if it says better. Verdicts are those of an ablation with one comparison.
"""

import sys
from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np

from lm.lab.ablation.statistics import Comparison, judge_family

QUESTIONS, USEFUL, EFFECT, SEEDS = 100, 10, 2.0, 5
MARGIN = 1e-9  # nothing is equivalent
Answer = tuple[bool, int, float]  # whether a change is kept, runs of its arm, and the gain that is reported


def judged(values: Sequence[float]) -> Comparison:
    return judge_family({"": [*values]}, MARGIN)[""]


def once(draw: Callable[[int], list[float]]) -> Answer:
    (value,) = draw(1)
    return value < 0, 1, -value


def seeds(draw: Callable[[int], list[float]]) -> Answer:
    values = draw(SEEDS)
    return judged(values).verdict == "better", SEEDS, -fmean(values)


def confirmed(draw: Callable[[int], list[float]]) -> Answer:
    """What is better is asked again on as many fresh seeds, which alone are reported."""
    is_kept, n, _ = seeds(draw)
    if not is_kept:
        return False, n, 0.0
    is_kept, again, gain = seeds(draw)
    return is_kept, n + again, gain


def draws(rng: np.random.Generator, i: int) -> Callable[[int], list[float]]:
    """Fresh differences of a question; every tenth change is useful."""
    mean = -EFFECT if i % (QUESTIONS // USEFUL) == 0 else 0.0
    return lambda n: [*map(float, mean + rng.standard_normal(n))]


def row(name: str, ask: Callable[[np.random.Generator], list[Answer]], repetitions: int) -> str:
    useless, found, runs, gains = [], [], [], []
    for i in range(repetitions):
        answers = ask(np.random.default_rng(i))
        useful = [answer for j, answer in enumerate(answers) if j % (QUESTIONS // USEFUL) == 0]
        kept = [answer for answer in answers if answer[0]]
        useless.append(len(kept) - sum(is_kept for is_kept, *_ in useful))
        found.append(fmean(is_kept for is_kept, *_ in useful))
        runs.append(sum(n for _, n, _ in answers))
        gains += [gain for _, _, gain in kept]
    truth = EFFECT * fmean(found) * USEFUL / (fmean(found) * USEFUL + fmean(useless))
    share = fmean(useless) / (fmean(useless) + fmean(found) * USEFUL)
    return (
        f"| {name} | {fmean(useless):.1f} | {fmean(found):.0%} | {share:.0%} | {fmean(gains) / truth:.2f} | "
        f"{fmean(runs):.0f} |"
    )


def each(rule: Callable[[Callable[[int], list[float]]], Answer]) -> Callable[[np.random.Generator], list[Answer]]:
    return lambda rng: [rule(draws(rng, i)) for i in range(QUESTIONS)]


if __name__ == "__main__":
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for name, ask in {
        "one seed, keep the lower": each(once),
        f"{SEEDS} seeds": each(seeds),
        "and `confirm`": each(confirmed),
    }.items():
        print(row(name, ask, repetitions), flush=True)
