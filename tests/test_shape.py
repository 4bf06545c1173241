"""Skewed and spiked differences are flagged, normal ones seldom; and the sign-flip test is exact for equal arms.

`python tests/test_shape.py` prints the table of docs/ablations.md.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.ablation_folder import change_results, make, numbers
from numpy.typing import NDArray
from scipy import stats

from lm.ablation.judge.shape import normality_p, sign_flip_p
from lm.ablation.report import write_report

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


@pytest.mark.parametrize(
    ("differences", "told"),
    [
        ([0.010, 0.012, 0.011, 0.009, 0.010, 0.011], False),
        ([0.010, 0.012, 0.011, 0.009, 0.010, 0.061], True),
        ([0.010, 0.010, 0.010, 0.010, 0.010, 0.010], False),
    ],
)
def test_differences_with_an_outlier_are_told(differences: list[float], told: bool, tmp_path: Path) -> None:
    """A warning from six seeds on, and the p that needs no normal distribution beside it."""
    seeds = tuple(range(len(differences)))
    path = make(tmp_path, seeds=seeds, budgets=("tokens",), report=False)
    for seed, difference in enumerate(differences):
        change_results(path, f"tied-seed{seed}-*", val_loss=3.5)
        change_results(path, f"untied-seed{seed}-*", val_loss=3.5 + difference)
    write_report(path)
    summaries = [warning["summary"] for warning in numbers(path)["warnings"]]
    assert any(one.startswith("Differences are skewed") and "untied - tied" in one for one in summaries) is told
    (row,) = (one for one in numbers(path)["contrasts"] if one["arm"] == "untied")
    assert row["p_sign_flip"] == pytest.approx(1 / 32)


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
