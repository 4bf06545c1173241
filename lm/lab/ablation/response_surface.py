"""The loss of an arm as a function of its hyperparameters, fitted to its trials, and the regret of settings on it.

A trial is noisy, so the best trial is partly the luckiest. A surface that is fitted to all of them averages the noise
(response surface methodology: Box and Wilson, 1951). Its uncertainty says how far the loss at chosen settings may be
above the lowest one: their simple regret. Coordinates are logarithms to the base `tune.factor` of the hyperparameters,
so a distance of one is a whole factor. Losses are lower where better, and infinite where training diverged.

Everything here is a pure function of arrays: x of shape (n, k), n trials of k hyperparameters, and y of shape (n,).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats
from scipy.stats import qmc

from lm.lab.ablation.statistics import TuningVariance

Array = NDArray[np.float64]
LOCAL_RADIUS = 1.5  # factors around the best trial: what lies farther away says little about the trough
OUTLIER_RATIO = 3  # times the median excess over the best loss: there the loss is no cubic any more
BLOW_UP_RATIO = 6  # times the next lower excess, which a cubic does not reach: training blew up, but stayed finite
GRID = 1 / 16  # factors between points at which a surface is compared
CURVATURE, SKEW = 0.7, 0.15  # prior standard deviations of x² and x³, as fractions of the expected curvature
VAGUE_PRIOR_SCALE = 100  # that of the constant and of x, as a multiple of the spread of the losses
CLIFF_REACH = 1.25  # gaps to a diverged trial in which the best value may lie; with 1 the prior of x² makes it too few
DRAWS = 4096  # quasi-random: a standard deviation of regrets is within some per cent of that of infinitely many
POWERS = np.arange(1, 4)
EPS = 1e-9


def is_determined(x: Array, y: Array) -> bool:
    """Whether as many trials have finished as a surface has unknowns."""
    return bool(np.isfinite(y).sum() > 2 * x.shape[1])


def with_blow_ups_diverged(x: Array, y: Array) -> Array:
    """The losses, infinite also where a trial near the best blew up without becoming infinite.

    One such value would say that all trials are noise. As many trials as a surface has unknowns stay finite.
    """
    near = np.isfinite(y) & (np.abs(x - x[np.argmin(y)]) <= LOCAL_RADIUS).all(1)
    excess = np.sort(y[near]) - y.min()
    for i in range(2 * x.shape[1] + 1, len(excess)):
        if excess[i] > BLOW_UP_RATIO * excess[i - 1]:
            return np.where(near & (y - y.min() >= excess[i]), math.inf, y)
    return y


def local_trials(x: Array, y: Array) -> tuple[Array, Array]:
    """The trials that a surface is fitted to: around the best; if these are too few, all that are not far worse."""
    kept = np.isfinite(y)
    near = kept & (np.abs(x - x[np.argmin(y)]) <= LOCAL_RADIUS).all(1)
    if near.sum() > 2 * x.shape[1]:
        return x[near], y[near]
    excess = y - y.min()
    good: NDArray[np.bool_] = kept & (excess <= OUTLIER_RATIO * np.median(excess[kept]))
    if good.sum() > 2 * x.shape[1]:
        return x[good], y[good]
    return x[kept], y[kept]


@cache
def _grid(first: int, last: int) -> tuple[Array, Array]:
    """A grid (G,) of coordinates, from `first` to `last` of its distances, and its powers (G, 3)."""
    grid = np.arange(first, last + 1, dtype=np.float64) * GRID
    return grid, grid[:, None] ** POWERS


@cache
def _standard_normal(size: int) -> Array:
    """(size, DRAWS): the same draws always, so that a verdict does not change from one report to the next."""
    uniform = qmc.Sobol(size, scramble=False).random(DRAWS) + 0.5 / DRAWS
    return np.ascontiguousarray(special.ndtri(uniform).T)


def polynomial_features(x: Array, degree: int) -> Array:
    """(n, k) to (n, 1 + k * degree): 1, then x, then x², ..."""
    return np.concatenate([np.ones((len(x), 1)), *(x**power for power in range(1, degree + 1))], axis=1)


def fit_quadratic(x: Array, y: Array) -> tuple[Array, float, int]:
    """Least squares without interactions: the curvatures (k,), the squared residuals' sum, its degrees of freedom.

    A curvature is at least a tenth of what the spread of the losses suggests, so that a surface has a lowest point.
    """
    coefficients, squares, df = _least_squares(polynomial_features(x, 2), y)
    radius = np.abs(x - x.mean(0)).max(0)
    least = np.maximum(0.1 * (y.max() - y.min()) / np.maximum(radius, 0.5) ** 2, EPS)
    return np.maximum(coefficients[1 + x.shape[1] :], least), squares, df


def _least_squares(features: Array, y: Array) -> tuple[Array, float, int]:
    """Coefficients, the sum of the squared residuals, and its degrees of freedom."""
    coefficients, _, rank, _ = np.linalg.lstsq(features, y, rcond=None)
    residuals: Array = y - features @ coefficients
    return np.asarray(coefficients, dtype=float), float(residuals @ residuals), len(y) - int(rank)


def no_effect_p(x: Array, y: Array, columns: Sequence[int], noise: float | None, df: int) -> float:
    """The p of the F test that these hyperparameters make no difference, given the noise of a trial and its df.

    0 where that is not known, or where a trial diverged: then they do make one.
    """
    if not columns or noise is None or not np.isfinite(y).all():
        return 0.0
    features = polynomial_features(x, 2)
    without = np.delete(features, [1 + j + degree * x.shape[1] for j in columns for degree in (0, 1)], axis=1)
    (_, least, df_of_all), (_, most, df_of_others) = _least_squares(features, y), _least_squares(without, y)
    n = df_of_others - df_of_all
    return float(stats.f.sf((most - least) / n / max(noise, EPS) ** 2, n, df)) if n else 0.0


@dataclass(slots=True, frozen=True)
class Surface:
    """The posterior of a separable cubic in k hyperparameters, given trials with normal noise."""

    low: Array  # (k,) the range of the trials that it is fitted to
    high: Array
    gap: Array  # (2, k) factors from that range down and up to the nearest trial that diverged; infinite: none did
    mean: Array  # (1 + 3k,) coefficients of `polynomial_features`, of the excess over the best loss of these trials
    root: Array  # (1 + 3k, 1 + 3k), the lower triangular root of their covariance

    def _grid(self, j: int, below: float, above: float) -> tuple[Array, Array]:
        return _grid(math.floor((self.low[j] - below) / GRID), math.ceil((self.high[j] + above) / GRID))

    def optimum(self, extrapolation: float = 0.0) -> Array:
        """(k,) the point of the lowest expected loss, at most `extrapolation` factors outside of what was tried.

        It is half a factor or more from what diverged.
        """
        k, point = len(self.low), np.zeros(len(self.low))
        for j in range(k):
            grid, powers = self._grid(j, *np.clip(self.gap[:, j] - 0.5, 0, extrapolation))
            point[j] = grid[(powers @ self.mean[1 + j :: k]).argmin()]
        return point

    def regrets(self, point: Array, extrapolation: float = 0.25) -> Array:
        """(k, DRAWS): how far the loss at a point is above the lowest one, for each hyperparameter of each draw.

        The lowest point is at most `extrapolation` factors outside of what was tried. Towards a trial that diverged it
        may lie as far as training does not diverge, which is anywhere in the gap.
        """
        k, size, rows = len(self.low), len(self.mean), []
        draws = _standard_normal(size + 2 * k)
        coefficients = self.mean[:, None] + self.root @ draws[:size]
        shares = special.ndtr(draws[size:]).reshape(2, k, DRAWS)
        reach = np.where(np.isfinite(self.gap), CLIFF_REACH * self.gap, extrapolation)
        for j in range(k):
            line = coefficients[1 + j :: k]  # (3, DRAWS)
            grid, powers = self._grid(j, *reach[:, j])
            losses = powers @ line
            outside = (self.low[j] - grid, grid - self.high[j])
            for gap, share, factors in zip(self.gap[:, j], shares[:, j], outside, strict=True):
                if gap < math.inf:
                    losses[factors[:, None] > CLIFF_REACH * gap * share] = math.inf
            rows.append(np.maximum(point[j] ** POWERS @ line - losses.min(0), 0.0))
        return np.stack(rows)

    def slope(self, point: Array) -> Array:
        """(k,) by how much the expected loss rises per factor at a point."""
        derivatives = POWERS * point[:, None] ** (POWERS - 1)  # (k, 3) of x, x² and x³
        return np.asarray((derivatives * self.mean[1:].reshape(3, -1).T).sum(1))


def fit(x: Array, y: Array, noise: float | None = None) -> Surface:
    """The surface of an arm. `noise` is the standard deviation of a trial, by default that of the residuals."""
    diverged = x[~np.isfinite(y)]
    x, y = local_trials(x, y)
    gaps = np.stack([x.min(0) - diverged, diverged - x.max(0)])  # (2, number of diverged trials, k)
    gap = np.where(gaps > 0, gaps, math.inf).min(1, initial=math.inf)
    expected, squares, df = fit_quadratic(x, y)
    if noise is None:
        noise = (squares / df) ** 0.5 if df else 0.0
    spread, k = float(y.max() - y.min()), x.shape[1]
    noise = max(noise, 1e-3 * spread, EPS)
    vague = np.full(1 + k, VAGUE_PRIOR_SCALE * max(spread, float(expected.max())))
    precision = np.concatenate([vague, CURVATURE * expected, SKEW * expected]) ** -2.0
    prior = np.concatenate([np.zeros(1 + k), expected, np.zeros(k)])
    features = polynomial_features(x, 3)
    # inverted by way of its own root, backwards: that of the covariance would not exist where the noise is small
    inverse = features.T @ features / noise**2 + np.diag(precision)
    upper = np.linalg.cholesky(inverse[::-1, ::-1])[::-1, ::-1]
    root = np.linalg.inv(upper).T
    mean = root @ (root.T @ (features.T @ (y - y.min()) / noise**2 + precision * prior))
    return Surface(x.min(0), x.max(0), gap, mean, root)


@dataclass(slots=True, frozen=True)
class Regret:
    """The simple regret of an arm's settings: how far the loss there is above that of the arm's own best settings."""

    mean: float  # in the unit of the metric, not below zero
    variance: float
    df: int  # of the noise of a trial


def pooled_noise(trials: Iterable[tuple[Array, Array]]) -> tuple[float | None, int]:
    """The standard deviation of a trial, from the residuals of all arms, for one alone has few; and its df.

    None without degrees of freedom.
    """
    residuals = [fit_quadratic(*local_trials(x, y))[1:] for x, y in trials]
    squares, df = sum(squares for squares, _ in residuals), sum(df for _, df in residuals)
    return (math.sqrt(squares / df) if df else None), df


def combine_regrets(weights: Mapping[str, float], regrets: Mapping[str, Regret]) -> TuningVariance | None:
    """What the tuning of arms adds to the uncertainty of the sum of their metrics with these weights.

    A difference of an arm from its baseline has the weights 1 and -1. Arms of weight 0 do not count. None if the regret
    of another is missing. Of the sum of expected regrets only the size is used: a mean is not corrected by what it may
    be biased.
    """
    weights = {arm: weight for arm, weight in weights.items() if weight}
    if not weights.keys() <= regrets.keys():
        return None
    parts = [(weight, regrets[arm]) for arm, weight in weights.items()]
    variance = sum(weight**2 * regret.variance for weight, regret in parts)
    shift = sum(weight * regret.mean for weight, regret in parts)
    return TuningVariance(variance + shift**2, max(parts[0][1].df, 1))
