"""The loss of an arm as a function of its hyperparameters, fitted to its trials, and the regret of settings on it.

A trial is noisy, so the best trial is partly the luckiest. A surface that is fitted to all of them averages the noise
(response surface methodology: Box and Wilson, 1951). Its uncertainty says how far the loss at chosen settings may be
above the lowest one: their simple regret. Coordinates are logarithms to the base `tune.factor` of the hyperparameters,
so a distance of one is a whole factor. Losses are lower where better, and infinite where training diverged.

Everything here is a pure function of arrays: x of shape (n, k), n trials of k hyperparameters, and y of shape (n,).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import special
from scipy.stats import qmc

from lm.ablation.power import TuningVariance

Array = NDArray[np.float64]
LOCAL_RADIUS = 1.5  # factors around the best trial: what lies farther away says little about the trough
OUTLIER_RATIO = 3  # times the median excess over the best loss: there the loss is no cubic any more
GRID = 1 / 16  # factors between points at which a surface is compared
CURVATURE, SKEW = 0.7, 0.15  # prior standard deviations of x² and x³, as fractions of the expected curvature
VAGUE_PRIOR_SCALE = 100  # that of the constant and of x, as a multiple of the spread of the losses
DRAWS = 4096  # quasi-random: a standard deviation of regrets is within some per cent of that of infinitely many
POWERS = np.arange(1, 4)
EPS = 1e-9


def is_determined(x: Array, y: Array) -> bool:
    """Whether as many trials have finished as a surface has unknowns."""
    return bool(np.isfinite(y).sum() > 2 * x.shape[1])


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
    features = polynomial_features(x, 2)
    coefficients, _, rank, _ = np.linalg.lstsq(features, y, rcond=None)
    residuals = y - features @ coefficients
    radius = np.abs(x - x.mean(0)).max(0)
    least = np.maximum(0.1 * (y.max() - y.min()) / np.maximum(radius, 0.5) ** 2, EPS)
    return np.maximum(coefficients[1 + x.shape[1] :], least), float(residuals @ residuals), len(y) - int(rank)


@dataclass(slots=True, frozen=True)
class Surface:
    """The posterior of a separable cubic in k hyperparameters, given trials with normal noise."""

    low: Array  # (k,) the range of the trials that it is fitted to
    high: Array
    best_loss: float  # of these trials; the coefficients are of the excess over it
    mean: Array  # (1 + 3k,) coefficients of `polynomial_features`
    root: Array  # (1 + 3k, 1 + 3k), the lower triangular root of their covariance

    def _grid(self, j: int, extrapolation: float) -> tuple[Array, Array]:
        low, high = self.low[j] - extrapolation, self.high[j] + extrapolation
        return _grid(math.floor(low / GRID), math.ceil(high / GRID))

    def optimum(self, extrapolation: float = 0.0) -> Array:
        """(k,) the point of the lowest expected loss, at most `extrapolation` factors outside of what was tried."""
        k, point = len(self.low), np.zeros(len(self.low))
        for j in range(k):
            grid, powers = self._grid(j, extrapolation)
            point[j] = grid[(powers @ self.mean[1 + j :: k]).argmin()]
        return point

    def regrets(self, point: Array, extrapolation: float = 0.25) -> Array:
        """(k, DRAWS): how far the loss at a point is above the lowest one, for each hyperparameter of each draw."""
        coefficients = self.mean[:, None] + self.root @ _standard_normal(len(self.mean))
        k, rows = len(self.low), []
        for j in range(k):
            line = coefficients[1 + j :: k]  # (3, DRAWS)
            _, powers = self._grid(j, extrapolation)
            rows.append(np.maximum(point[j] ** POWERS @ line - (powers @ line).min(0), 0.0))
        return np.stack(rows)

    def profile(self, point: Array, j: int, extrapolation: float = 0.25) -> tuple[Array, Array, Array]:
        """Along hyperparameter j through a point: a grid of coordinates, the expected loss, its standard deviation."""
        grid, _ = self._grid(j, extrapolation)
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
    return Surface(x.min(0), x.max(0), float(y.min()), mean, root)


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
