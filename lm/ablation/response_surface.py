"""The loss of an arm as a function of its hyperparameters, fitted to its trials, and the regret of settings on it.

A trial is noisy, so the best trial is partly the luckiest. A surface that is fitted to all of them averages the noise
(response surface methodology: Box and Wilson, 1951). Its uncertainty says how far the loss at chosen settings may be
above the lowest one: their simple regret. Coordinates are logarithms to the base `tune.factor` of the hyperparameters,
so a distance of one is a whole factor. Losses are lower where better, and infinite where training diverged.

Everything here is a pure function of arrays: x of shape (n, k), n trials of k hyperparameters, and y of shape (n,).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from lm.ablation.power import TuningVariance

Array = NDArray[np.float64]
LOCAL_RADIUS = 1.5  # factors around the best trial: what lies farther away says little about the trough
OUTLIER_RATIO = 3  # times the median excess over the best loss: there the loss is no cubic any more
GRID = 1 / 16  # factors between points at which a surface is compared
CURVATURE, SKEW = 0.7, 0.15  # prior standard deviations of x² and x³, as fractions of the expected curvature
VAGUE_PRIOR_SCALE = 100  # that of the constant and of x, as a multiple of the spread of the losses
DRAWS = 400
POWERS = np.arange(1, 4)
EPS = 1e-9


def is_determined(x: Array, y: Array) -> bool:
    """Whether as many trials have finished as a surface has unknowns."""
    return bool(np.isfinite(y).sum() > 2 * x.shape[1])


def local_trials(x: Array, y: Array) -> tuple[Array, Array]:
    """The trials that a surface is fitted to: around the best; if these are too few, all that are not far worse."""
    finite = np.isfinite(y)
    excess = y - y.min()
    near = finite & (np.abs(x - x[np.argmin(y)]) <= LOCAL_RADIUS).all(1)
    good = finite & (excess <= OUTLIER_RATIO * np.median(excess[finite]))
    kept = next((rows for rows in (near, good) if rows.sum() > 2 * x.shape[1]), finite)
    return x[kept], y[kept]


@cache
def _standard_normal(size: int) -> Array:
    """(DRAWS, size): the same draws always, so that a verdict does not change from one report to the next."""
    return np.random.default_rng(0).standard_normal((DRAWS, size))


def polynomial_features(x: Array, degree: int) -> Array:
    """(n, k) to (n, 1 + k * degree): 1, then x, then x², ..."""
    return np.hstack([np.ones((len(x), 1)), *(x**power for power in range(1, degree + 1))])


def fit_quadratic(x: Array, y: Array) -> tuple[Array, float, int]:
    """Least squares without interactions: the curvatures (k,), the squared residuals' sum, its degrees of freedom.

    A curvature is at least a tenth of what the spread of the losses suggests, so that a surface has a lowest point.
    """
    features = polynomial_features(x, 2)
    coefficients, _, rank, _ = np.linalg.lstsq(features, y, rcond=None)
    residuals = y - features @ coefficients
    radius = np.abs(x - x.mean(0)).max(0)
    least = np.maximum(0.1 * np.ptp(y) / np.maximum(radius, 0.5) ** 2, EPS)
    return np.maximum(coefficients[1 + x.shape[1] :], least), float(residuals @ residuals), len(y) - int(rank)


@dataclass(slots=True, frozen=True)
class Surface:
    """The posterior of a separable cubic in k hyperparameters, given trials with normal noise."""

    low: Array  # (k,) the range of the trials that it is fitted to
    high: Array
    best_loss: float  # of these trials; the coefficients are of the excess over it
    mean: Array  # (1 + 3k,) coefficients of `polynomial_features`
    root: Array  # (1 + 3k, 1 + 3k), the lower triangular root of their covariance

    def _grid(self, j: int, extrapolation: float) -> Array:
        first, last = math.floor((self.low[j] - extrapolation) / GRID), math.ceil((self.high[j] + extrapolation) / GRID)
        return np.arange(first, last + 1) * GRID

    def optimum(self, extrapolation: float = 0.0) -> Array:
        """(k,) the point of the lowest expected loss, at most `extrapolation` factors outside of what was tried."""
        k, point = len(self.low), np.zeros(len(self.low))
        for j in range(k):
            grid = self._grid(j, extrapolation)
            point[j] = grid[(self.mean[1 + j :: k] @ grid ** POWERS[:, None]).argmin()]
        return point

    def regrets(self, point: Array, extrapolation: float = 0.25) -> Array:
        """(DRAWS, k): how far the loss at a point is above the lowest one, for each hyperparameter of each draw."""
        coefficients = self.mean + _standard_normal(len(self.mean)) @ self.root.T
        k, columns = len(self.low), []
        for j in range(k):
            line = coefficients[:, 1 + j :: k]
            lowest = (line @ self._grid(j, extrapolation) ** POWERS[:, None]).min(1)
            columns.append(np.maximum(line @ point[j] ** POWERS - lowest, 0.0))
        return np.stack(columns, 1)

    def profile(self, point: Array, j: int, extrapolation: float = 0.25) -> tuple[Array, Array, Array]:
        """Along hyperparameter j through a point: a grid of coordinates, the expected loss, its standard deviation."""
        grid = self._grid(j, extrapolation)
        x = np.tile(point, (len(grid), 1))
        x[:, j] = grid
        features = polynomial_features(x, 3)
        return grid, self.best_loss + features @ self.mean, np.linalg.norm(features @ self.root, axis=1)


def fit(x: Array, y: Array, noise: float | None = None) -> Surface:
    """The surface of an arm. `noise` is the standard deviation of a trial, by default that of the residuals."""
    x, y = local_trials(x, y)
    expected, squares, df = fit_quadratic(x, y)
    if noise is None:
        noise = (squares / df) ** 0.5 if df else 0.0
    spread, k = float(np.ptp(y)), x.shape[1]
    noise = max(noise, 1e-3 * spread, EPS)
    vague = np.full(1 + k, VAGUE_PRIOR_SCALE * max(spread, float(expected.max())))
    precision = np.r_[vague, CURVATURE * expected, SKEW * expected] ** -2.0
    prior = np.r_[np.zeros(1 + k), expected, np.zeros(k)]
    features = polynomial_features(x, 3)
    # inverted by way of its own root, backwards: that of the covariance would not exist where the noise is small
    inverse = features.T @ features / noise**2 + np.diag(precision)
    upper = np.linalg.cholesky(inverse[::-1, ::-1])[::-1, ::-1]
    root = np.linalg.inv(upper).T
    mean = root @ (root.T @ (features.T @ (y - y.min()) / noise**2 + precision * prior))
    return Surface(x.min(0), x.max(0), float(y.min()), mean, root)


@dataclass(slots=True, frozen=True)
class Regret:
    """The simple regret of an arm's settings: how far the loss there is above that of the arm's own best settings."""

    mean: float  # in the unit of the metric, not below zero
    variance: float
    df: int  # of the noise of a trial


def regrets(trials: Mapping[str, tuple[Array, Array]], points: Mapping[str, Array]) -> dict[str, Regret]:
    """By arm, the regret at its point. The noise of a trial is pooled over the arms: one alone has few.

    An arm with fewer trials than its surface has unknowns is left out; one without hyperparameters has no regret.
    """
    determined = {arm: xy for arm, xy in trials.items() if is_determined(*xy)}
    residuals = [fit_quadratic(*local_trials(x, y))[1:] for x, y in determined.values()]
    squares, df = (sum(column) for column in zip(*residuals, strict=True)) if residuals else (0.0, 0)
    noise = math.sqrt(squares / df) if df else None
    by_arm = {}
    for arm, (x, y) in determined.items():
        draws = fit(x, y, noise).regrets(points[arm]).sum(1) if x.shape[1] else np.zeros(1)
        by_arm[arm] = Regret(float(draws.mean()), float(draws.var()), int(df))
    return by_arm


def combine_regrets(weights: Mapping[str, int], regrets: Mapping[str, Regret]) -> TuningVariance | None:
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
