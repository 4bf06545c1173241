"""Divergence as an outcome: whether one of two arms diverges more often than the other."""

from dataclasses import dataclass
from functools import lru_cache

from scipy import stats


@dataclass(slots=True, frozen=True)
class Divergence:
    """Of how many runs that came to an end how many diverged, for an arm and its baseline."""

    arm: int
    arm_ended: int
    baseline: int
    baseline_ended: int

    @property
    def p(self) -> float:
        """Fisher's exact test, two-sided (Fisher, 1935): whether both arms diverge equally often.

        It takes the runs for independent. Those of a seed share what the seed decides, so both tend to diverge or
        neither, which makes the counts more alike than independent ones: the test is then conservative.
        """
        return fisher(self.arm, self.arm_ended, self.baseline, self.baseline_ended)

    def testable(self, alpha: float) -> bool:
        """Whether so many divergences would be significant at level `alpha` if they were all of one arm.

        Otherwise no test is made, and none is counted among the comparisons: it could not reject (Tarone, 1990).
        """
        total = self.arm + self.baseline
        first, last = min(total, self.arm_ended), min(total, self.baseline_ended)
        one_sided = ((first, total - first), (total - last, last))
        return any(fisher(arm, self.arm_ended, other, self.baseline_ended) <= alpha for arm, other in one_sided)


@lru_cache(10_000)
def fisher(arm: int, arm_ended: int, baseline: int, baseline_ended: int) -> float:
    table = [[arm, arm_ended - arm], [baseline, baseline_ended - baseline]]
    return float(stats.fisher_exact(table).pvalue)
