"""Planned looks keep their level: over all looks, false verdicts are as rare as with one.

Simulated through `judge`: normal differences of standard deviation 1, seed by seed, judged at each planned look until
one decides. `python tests/test_looks.py` prints the table of docs/ablations.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from test_plan import question
from test_statistics import at_most
from test_study import row, study

from lm.ablation.judge import statistics
from lm.ablation.judge.advice import Advice
from lm.ablation.judge.level import level
from lm.ablation.judge.looks import decides, look_now, saved, seeds_looked_at
from lm.ablation.judge.power import ALPHA, Tuning
from lm.ablation.judge.statistics import judge
from lm.config import BadInput

PLANS = [(5, 8, 12), (3, 5, 8), (5, 10)]
MARGIN, TUNED = 0.5, 0.3  # in standard deviations of a difference: margin, and the noise of tuning
TINY, DF = 1e-9, 12
APART, ALIKE = ("better", "worse"), ("equivalent",)


@dataclass
class Found:
    verdicts: list[set[str]]  # of each family, at the look where it stopped
    seeds: float  # on average

    def rate(self, *kinds: str) -> float:
        return float(np.mean([bool(one & {*kinds}) for one in self.verdicts]))


def simulate(
    looks: Sequence[int],
    mean: float,
    margin: float,
    repeats: int,
    comparisons: int = 1,
    tuned: bool = False,
    alpha: float | None = None,
    until: Sequence[str] = (),
) -> Found:
    """Families stop at the look at which all is decided; with `until`, at the first look with such a verdict."""
    alpha = level(tuple(looks), comparisons) if alpha is None else alpha
    draw, found, made = np.random.default_rng([*looks, comparisons, tuned]), [], 0
    for _ in range(repeats):
        values = mean + draw.standard_normal((comparisons, looks[-1]))
        tunings = {}
        if tuned:  # the settings stay the same at all looks
            values += TUNED * draw.standard_normal((comparisons, 1))
            known = TUNED**2 * draw.chisquare(DF, comparisons) / DF
            tunings = {str(i): Tuning(float(one), DF) for i, one in enumerate(known)}
        verdicts: list[str] = []
        for n in looks:
            family = {str(i): one[:n].tolist() for i, one in enumerate(values)}
            verdicts = [one.verdict for one in judge(family, margin, tunings=tunings, alpha=alpha).values()]
            if {*until} & {*verdicts} if until else "undecided" not in verdicts:
                break
        found.append({*verdicts})
        made += n
    return Found(found, made / repeats)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def hurry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(statistics, "advise", lambda *_: Advice(None, None))
    patch.setattr(statistics, "minimum_detectable_effect", lambda *_, **__: None)


CASES = [(plan, k, tuned) for plan in PLANS for k in (1, 3) for tuned in (False, True) if not tuned or plan[0] >= 5]


@pytest.mark.usefixtures("hurried")
@pytest.mark.slow
@pytest.mark.parametrize(("looks", "comparisons", "tuned"), CASES)
def test_false_verdicts_at_all_looks_together_keep_the_level(
    looks: tuple[int, ...], comparisons: int, tuned: bool
) -> None:
    apart = simulate(looks, 0.0, TINY, 1000, comparisons, tuned, until=APART)
    assert at_most(apart.rate(*APART), ALPHA, 1000)
    alike = simulate(looks, 3.0, 3.0, 1000, comparisons, tuned, until=ALIKE)
    assert at_most(alike.rate(*ALIKE), ALPHA, 1000)


@pytest.mark.usefixtures("hurried")
def test_the_level_is_kept_and_without_it_looks_find_differences_where_there_are_none() -> None:
    often = (3, 4, 5, 6, 8)
    assert at_most(simulate(often, 0.0, TINY, 300, until=APART).rate(*APART), ALPHA, 300)
    assert not at_most(simulate(often, 0.0, TINY, 300, until=APART, alpha=ALPHA).rate(*APART), ALPHA, 300)


def test_the_level_lies_between_bonferronis_and_that_of_one_look() -> None:
    assert level((12,)) == level(()) == ALPHA
    assert level((5, 8, 12)) == pytest.approx(0.0212, abs=3e-4)  # Pocock's for the normal distribution is 0.0231
    for plan in PLANS:
        assert ALPHA / len(plan) <= level(plan, 3) <= level(plan) < ALPHA


@pytest.mark.parametrize("looks", [[3, 2], [1, 3], [2], [2, 2, 3], [2, 3, 4]])
def test_looks_that_make_no_plan_are_refused(looks: list[int]) -> None:
    with pytest.raises(BadInput, match=r"ablation\.looks=.*the last is all, 3"):
        question(seeds=[0, 1, 2], looks=looks)
    assert question(seeds=[0, 1, 2], looks=[2, 3]).looks == [2, 3]


def test_a_look_is_reached_when_its_seeds_have_ended_and_none_after_them() -> None:
    rows = [row(arm, seed, ["tokens"]) for seed in range(3) for arm in "ab"]
    plan: dict[str, Any] = {"contrasts": {"b": "a"}, "primary": ["b"], "looks": [2, 3]}

    def reached(*some: int, **changes: Any) -> int | None:
        found = [one if i in some else replace(one, status="missing", result={}) for i, one in enumerate(rows)]
        return look_now(study(found, ("tokens",), **{**plan, **changes}))

    assert reached(0, 1, 2, 3) == 2
    assert reached(0, 1, 2, 3, looks=[]) is None
    assert reached(0, 1, 2) is None
    assert reached(0, 1, 2, 3, 4) is None  # runs go on after it
    assert reached(*range(6)) == 3
    whole = study(rows, ("tokens",), **plan)
    (one,) = whole.contrasts()
    assert one.comparison.alpha == level((2, 3))
    assert not decides(whole, 2)  # two seeds are not enough
    assert decides(study(rows, ("tokens",), **{**plan, "equivalence_margin": 1e9}), 2)
    assert seeds_looked_at(whole, [one]) == [0, 1, 2]
    early = study([*rows[:5], replace(rows[5], status="missing", result={})], ("tokens",), **plan)
    assert seeds_looked_at(early, early.contrasts()) == [0, 1]  # those with a pair
    lost = study([*rows[:5], replace(rows[5], status="diverged", result={})], ("tokens",), **plan | {"looks": []})
    assert seeds_looked_at(lost, lost.contrasts()) == [0, 1, 2]  # a run that diverged will not come any more
    assert saved(whole) == ""


def table(repeats: int) -> None:
    print(
        "| looks | level of each | false verdicts | false equivalence | seeds at 0 | seeds at 2 | power | of one look |"
    )
    for plan in PLANS:
        cases = [(comparisons, tuned) for comparisons in (1, 3) for tuned in (False, True)]
        false = [simulate(plan, 0.0, TINY, repeats, *case, until=APART).rate(*APART) for case in cases]
        equal = [simulate(plan, 3.0, 3.0, repeats, *case, until=ALIKE).rate(*ALIKE) for case in cases]
        none, twice = (simulate(plan, mean, MARGIN, repeats) for mean in (0.0, 2 * MARGIN))
        once = simulate(plan[-1:], 2 * MARGIN, MARGIN, repeats)
        power = (one.rate(*APART) for one in (twice, once))
        levels = f"{level(plan):.4f}, {level(plan, 3):.4f}"
        rates = f"{min(false):.3f} to {max(false):.3f} | {min(equal):.3f} to {max(equal):.3f}"
        seeds = f"{none.seeds:.1f} | {twice.seeds:.1f}"
        print(
            f"| {', '.join(map(str, plan))} | {levels} | {rates} | {seeds} |",
            *(f"{p:.2f} |" for p in power),
            flush=True,
        )


if __name__ == "__main__":
    hurry(pytest.MonkeyPatch())
    table(2000)
