"""The loss of an arm over its hyperparameters, fitted to its trials: where it is lowest, and how sure that is.

A trial is noisy, so the best trial is partly the luckiest. A surface that is fitted to all of them averages the noise
(response surface methodology: Box and Wilson, 1951), and its uncertainty says how much worse than an arm's own best its
chosen settings may be: the regret. Coordinates are logarithms to the base `factor` of the settings over where the
search began, so a step of one is a whole factor.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NEAR = 1.5  # steps around the best trial: what lies farther away says little about the trough
FAR_WORSE = 3  # times the median excess over the best: there the loss is no cubic any more
GRID = 1 / 16  # steps between points at which a surface is compared
CURVATURE, SKEW = 0.7, 0.15  # prior standard deviations of x² and x³, as fractions of the expected curvature
WEAK = 100  # that of the constant and of x, as a multiple of the spread of the losses
DRAWS = 400
POWERS = np.arange(1, 4)
TINY = 1e-9


@dataclass(slots=True, frozen=True)
class Trials:
    """x: (n, k) coordinates; y: (n,) losses, lower is better, infinite where training diverged."""

    x: Array
    y: Array

    def enough(self) -> bool:
        """Whether as many trials have ended as a surface has unknowns."""
        return bool(np.isfinite(self.y).sum() > 2 * self.x.shape[1])

    def near(self) -> "Trials":
        """Those that a surface is fitted to: around the best; if these are too few, all that are not far worse."""
        ended = np.isfinite(self.y)
        excess = self.y - self.y.min()
        close = (np.abs(self.x - self.x[np.argmin(self.y)]) <= NEAR).all(1)
        good = excess <= FAR_WORSE * np.median(excess[ended])
        enough = (one for one in (ended & close, ended & good, ended) if one.sum() > 2 * self.x.shape[1])
        kept = next(enough, ended)
        return Trials(self.x[kept], self.y[kept])


@cache
def normal(size: int) -> Array:
    """(DRAWS, size): the same draws always, so that a verdict does not change from one report to the next."""
    return np.random.default_rng(0).standard_normal((DRAWS, size))


def powers(x: Array, highest: int) -> Array:
    """(n, k) to (n, 1 + k * highest): 1, then x, then x², ..."""
    return np.hstack([np.ones((len(x), 1)), *(x**power for power in range(1, highest + 1))])


def quadratic(trials: Trials) -> tuple[Array, float, int]:
    """Least squares without interactions: the curvatures (k,), the squared residuals' sum, its degrees of freedom.

    A curvature is at least a tenth of what the spread of the losses suggests, so that a surface has a lowest point.
    """
    n_hyperparameters = trials.x.shape[1]
    a = powers(trials.x, 2)
    found, _, rank, _ = np.linalg.lstsq(a, trials.y, rcond=None)
    residuals = trials.y - a @ found
    reach = np.abs(trials.x - trials.x.mean(0)).max(0)
    least = np.maximum(0.1 * np.ptp(trials.y) / np.maximum(reach, 0.5) ** 2, TINY)
    return np.maximum(found[1 + n_hyperparameters :], least), float(residuals @ residuals), len(trials.y) - int(rank)


@dataclass(slots=True, frozen=True)
class Surface:
    """The posterior of a separable cubic in k hyperparameters, given trials with normal noise."""

    low: Array  # (k,) the range that was tried
    high: Array
    mean: Array  # (1 + 3k,) coefficients of `powers`
    root: Array  # (1 + 3k, 1 + 3k), the lower triangular root of their covariance

    def lines(self, coefficients: Array, reach: float) -> list[tuple[Array, Array]]:
        """For each hyperparameter, a grid (G,) and the loss along it (N, G), of coefficients (N, 1 + 3k)."""
        k, found = len(self.low), []
        for j in range(k):
            first, last = np.floor((self.low[j] - reach) / GRID), np.ceil((self.high[j] + reach) / GRID)
            grid = np.arange(first, last + 1) * GRID
            found.append((grid, coefficients[:, 1 + j :: k] @ grid ** POWERS[:, None]))
        return found

    def optimum(self, reach: float = 0.0) -> Array:
        """The point of the lowest expected loss, at most `reach` steps outside of what was tried."""
        return np.array([grid[loss[0].argmin()] for grid, loss in self.lines(self.mean[None], reach)])

    def regrets(self, at: Array, reach: float = 0.25) -> Array:
        """(DRAWS, k): how far the loss at a point is above the lowest one, for each hyperparameter of each draw."""
        coefficients = self.mean + normal(len(self.mean)) @ self.root.T
        k, found = len(self.low), []
        for j, (_, loss) in enumerate(self.lines(coefficients, reach)):
            here = coefficients[:, 1 + j :: k] @ at[j] ** POWERS
            found.append(np.maximum(here - loss.min(1), 0.0))
        return np.stack(found, 1)


def fit(trials: Trials, noise: float | None = None) -> Surface:
    """The surface of an arm. `noise` is the standard deviation of a trial, by default that of the residuals."""
    near = trials.near()
    expected, squares, df = quadratic(near)
    if noise is None:
        noise = (squares / df) ** 0.5 if df else 0.0
    noise = max(noise, 1e-3 * float(np.ptp(near.y)), TINY)
    k = near.x.shape[1]
    weak = np.full(1 + k, WEAK * max(float(np.ptp(near.y)), float(expected.max())))
    precision = np.r_[weak, CURVATURE * expected, SKEW * expected] ** -2.0
    prior = np.r_[np.zeros(1 + k), expected, np.zeros(k)]
    a = powers(near.x, 3)
    # inverted by way of its own root, backwards: that of the covariance would not exist where the noise is small
    upper = np.linalg.cholesky((a.T @ a / noise**2 + np.diag(precision))[::-1, ::-1])[::-1, ::-1]
    root = np.linalg.inv(upper).T
    mean = root @ (root.T @ (a.T @ (near.y - near.y.min()) / noise**2 + precision * prior))
    return Surface(near.x.min(0), near.x.max(0), mean, root)
