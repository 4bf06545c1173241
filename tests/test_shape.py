"""Skewed and spiked differences are flagged, normal ones seldom; and the sign-flip test is exact for equal arms.

`python tests/test_shape.py` prints the table of docs/statistics.md.
"""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from test_study import row, study

from lm.ablation.judge.shape import normality_p, sign_flip_p
from lm.ablation.judge.study import Row
from lm.ablation.report.columns import statistics
from lm.ablation.report.verdict_warnings import shape

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


def spiked(draw: np.random.Generator, size: tuple[int, int]) -> Array:
    """One difference of ten is 6 standard deviations off; the mean is zero."""
    return np.asarray(draw.standard_normal(size) + 6 * (draw.random(size) < 0.1) - 0.6)


KINDS: dict[str, Draw] = {  # all with a mean of zero
    "normal": lambda draw, size: draw.standard_normal(size),
    "exponential": lambda draw, size: draw.exponential(size=size) - 1,
    "spiked": spiked,
}


def sample(kind: str, n: int, repeats: int) -> Array:
    return KINDS[kind](np.random.default_rng([n, len(kind)]), (repeats, n))


def flagged(kind: str, n: int, repeats: int) -> float:
    return float(np.mean([normality_p(row.tolist()) <= 0.05 for row in sample(kind, n, repeats)]))


def test_normal_differences_are_seldom_flagged_and_others_often() -> None:
    assert flagged("normal", 8, 1000) <= 0.05 + 3 * (0.05 * 0.95 / 1000) ** 0.5
    assert flagged("exponential", 8, 300) > 0.25
    assert flagged("spiked", 8, 300) > 0.3


@pytest.mark.parametrize("n", [6, 8, 11])
def test_all_patterns_of_signs_are_those_of_scipys_permutation_test(n: int) -> None:
    values = np.random.default_rng(n).standard_normal(n) + 0.6
    other = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p(values.tolist()) == pytest.approx(other.pvalue)
    assert sign_flip_p([-value for value in values]) == sign_flip_p(sorted(values))


def test_the_sign_flip_p_where_it_is_known() -> None:
    assert sign_flip_p([1.0] * 5) is None
    assert sign_flip_p([0.1, 0.2, 0.3, 0.1, 0.2, 0.3]) == 2 / 64  # rounding errors are no difference
    assert sign_flip_p([0.0] * 7) == 1
    many = np.random.default_rng(0).standard_normal(20) + 0.5
    drawn = sign_flip_p(many.tolist())
    assert drawn == sign_flip_p(many.tolist())  # the same draws always
    assert drawn == pytest.approx(stats.ttest_1samp(many, 0).pvalue, rel=0.25)


def test_equal_arms_with_spiked_losses_are_told_apart_5_times_in_100_by_sign_flips() -> None:
    """The difference of two equal arms is symmetric, whatever the noise is: 14 of 256 patterns are p = .055."""
    one, other = sample("spiked", 8, 800).reshape(2, 400, 8)
    found = np.mean([(sign_flip_p(row.tolist()) or 0) <= 0.05 for row in one - other])
    assert abs(found - 12 / 256) <= 3.5 * (0.05 * 0.95 / 400) ** 0.5


def rows_of(differences: list[float]) -> list[Row]:
    """An arm `b` that is so much above `a`, seed by seed."""
    found = []
    for seed, value in enumerate(differences):
        for arm, loss in (("a", 1.0), ("b", 1.0 + value)):
            result = row(arm, 0, []).result | {"val_loss": loss}
            found.append(Row(arm, seed, ["tokens"], f"cells/{arm}-{seed}", 10, "done", "", result))
    return found


@pytest.mark.parametrize(
    ("differences", "told"),
    [
        ([0.010, 0.012, 0.011, 0.009, 0.010, 0.011], False),
        ([0.010, 0.012, 0.011, 0.009, 0.010, 0.061], True),
        ([0.010, 0.010, 0.010, 0.010, 0.010, 0.010], False),
    ],
)
def test_differences_with_an_outlier_are_told(differences: list[float], told: bool) -> None:
    seeds = list(range(len(differences)))
    found = study(rows_of(differences), ("tokens", "flops"), contrasts={"b": "a"}, primary=["b"], seeds=seeds)
    contrasts = [one for one in found.contrasts() if one.budget == "tokens"]
    heads = [one.head for one in shape(found, contrasts)]
    assert heads == ["Differences are skewed or have outliers: b minus a at equal tokens."] * told
    assert statistics(contrasts)["p (sign-flip)"](contrasts[0]) == "0.031"


def test_the_sign_flip_p_stands_beside_from_six_seeds_on() -> None:
    found = study(rows_of([0.1, 0.2, 0.1, 0.3, 0.1]), ("tokens",), contrasts={"b": "a"}, seeds=list(range(5)))
    assert "p (sign-flip)" not in statistics(found.contrasts())


if __name__ == "__main__":
    print("| seeds | differences | flagged | t test | of those not flagged | sign-flip test |")
    for n in (5, 8, 12):
        for kind in KINDS:
            values = sample(kind, n, 4000)
            odd = np.array([normality_p(row.tolist()) <= 0.05 for row in values])
            t = stats.ttest_1samp(values, 0, axis=1).pvalue <= 0.05
            flips = [sign_flip_p(row.tolist()) for row in values]
            level = "-" if n < 6 else f"{np.mean([(p or 0) <= 0.05 for p in flips]):.3f}"
            print(f"| {n} | {kind} | {odd.mean():.3f} | {t.mean():.3f} | {t[~odd].mean():.3f} | {level} |", flush=True)
