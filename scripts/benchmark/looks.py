"""How often planned looks err, by simulation: the table in docs/statistics.md.

    python scripts/benchmark/looks.py [repetitions]

Differences have the standard deviation 1. The margin is 0.5, and 3 for false equivalence, which few seeds do not show
within 0.5. Verdicts are those of an ablation with one and with three comparisons, without and with noise of tuning.
"""

import sys
from itertools import product
from statistics import fmean

import numpy as np

from lm.lab.ablation.statistics import ALPHA, TuningVariance, judge_family

PLANS = ((5, 8, 12), (3, 5, 8), (5, 10), (4, 8, 12))
MARGIN, WIDE, TUNING_SD, TUNING_DF = 0.5, 3.0, 0.3, 10
DIFFERENT = ("better", "worse")


def ends(
    looks: tuple[int, ...], mean: float, n: int, sd: float, repetitions: int, margin: float = MARGIN
) -> list[tuple[int, list[list[str]]]]:
    """For each family of n comparisons at which look it stops, and the verdicts of all looks."""
    random, families = np.random.default_rng([*looks, n, round(10 * sd), round(10 * mean)]), []
    for _ in range(repetitions):
        values = mean + random.standard_normal((n, looks[-1])) + sd * random.standard_normal((n, 1))
        known = sd**2 * random.chisquare(TUNING_DF) / TUNING_DF
        tunings = {str(i): TuningVariance(known, TUNING_DF) for i in range(n)} if sd else {}
        verdicts = []
        for look in looks:
            family = {str(i): row[:look].tolist() for i, row in enumerate(values)}
            judged = judge_family(family, margin, tunings=tunings, alpha=ALPHA / len(looks)).values()
            verdicts.append([each.verdict for each in judged])
        stop = next((i for i, every in enumerate(verdicts) if "undecided" not in every), len(looks) - 1)
        families.append((stop, verdicts))
    return families


def row(looks: tuple[int, ...], repetitions: int) -> str:
    false, equivalent = [], []
    for n, sd in product((1, 3), (0.0, TUNING_SD)):
        equal, apart = (ends(looks, mean, n, sd, repetitions, margin) for mean, margin in ((0.0, MARGIN), (WIDE, WIDE)))
        false.append(fmean(any(word in DIFFERENT for every in all_ for word in every) for _, all_ in equal))
        equivalent.append(fmean(any("equivalent" in every for every in all_) for _, all_ in apart))
    equal, large = (ends(looks, mean, 1, 0.0, repetitions) for mean in (0.0, 2 * MARGIN))
    seeds = [fmean(looks[stop] for stop, _ in families) for families in (equal, large)]
    power = fmean(verdicts[stop][0] in DIFFERENT for stop, verdicts in large)
    once = fmean(verdicts[0][0] in DIFFERENT for _, verdicts in ends(looks[-1:], 2 * MARGIN, 1, 0.0, repetitions))
    ranges = " | ".join(f"{min(rates):.3f} to {max(rates):.3f}" for rates in (false, equivalent))
    numbers = f"{seeds[0]:.1f} | {seeds[1]:.1f} | {power:.2f} | {once:.2f}"
    return f"| {', '.join(map(str, looks))} | {ALPHA / len(looks):.4f} | {ranges} | {numbers} |"


if __name__ == "__main__":
    for plan in PLANS:
        print(row(plan, int(sys.argv[1]) if len(sys.argv) > 1 else 2000), flush=True)
