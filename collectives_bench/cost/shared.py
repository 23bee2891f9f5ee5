"""Fit the constants that operations and worlds share, so that unmeasured worlds can be predicted.

The fit minimises squares of log(predicted / measured) over the logarithms of the constants, so that no constant becomes
negative and all sizes have equal weight. The method is by Levenberg (1944) and Marquardt (1963), with Huber's weights
(1964) to limit the influence of single bad points.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives_bench.cost.formulas import cost

Array = NDArray[np.float64]

NAMES: Final = ("base_s", "alpha_s", "beta_s", "gamma_s", "delta_s", "overhead_s", "host_s", "crowding", "rank_s")
LINKS: Final = ("base_s", "alpha_s", "beta_s", "rank_s", "gamma_s", "delta_s")
FIRST_CROWDING: Final = 0.1
ITERATIONS: Final = 80
HUBER: Final = 1.345
FLOOR: Final = 0.02  # smaller errors of log(predicted / measured) count as equally good
STEP: Final = 1e-4
NOTHING: Final = 1e-4  # a constant is set to 0 if its share is below this in every time


@dataclass(frozen=True)
class MeasuredPoint:
    """One measured time of an operation on S bytes between `hosts` hosts."""

    operation: str
    nbytes: float
    ranks: int
    hosts: int
    seconds: float


def fit_constants(
    points: Sequence[MeasuredPoint], *, backend: str, cores: int, form: Sequence[str] = NAMES
) -> dict[str, float]:
    """Return the constants by name. Constants that are not in `form` are 0."""
    model = _FitModel(points, backend, cores)
    free = [NAMES.index(name) for name in form]
    found = [model.solve(start, free) for start in model.starts()]
    values = min(found, key=lambda each: each[1])[0]
    constants = np.zeros(len(NAMES))
    constants[free] = np.exp(values[free])
    share = model.shares(constants)
    return {name: float(constants[i]) if share[i] > NOTHING else 0.0 for i, name in enumerate(NAMES)}


class _FitModel:
    """The model to fit: the counts of all points as columns, and the times."""

    def __init__(self, points: Sequence[MeasuredPoint], backend: str, cores: int) -> None:
        costs = [
            cost(each.operation, each.nbytes, ranks=each.ranks, nodes=each.hosts, backend=backend) for each in points
        ]
        table = np.array([astuple(each) for each in costs], dtype=np.float64)  # points x counts
        self.steps, self.link, self.rank, self.messages, self.host = table[:, :5].T
        self.reduced, self.copied = table[:, 5:7].T
        self.host_reduced, self.host_copied = table[:, 7:9].T / cores
        here = np.array([each.ranks / each.hosts for each in points])
        self.crowd = np.maximum(here / cores - 1, 0.0)
        self.seconds = np.array([each.seconds for each in points])

    def times(self, x: Array) -> Array:
        """Return the modelled times for constants in the order of NAMES."""
        links = self.steps * x[1] + self.link * x[2] + self.rank * x[8] + self.reduced * x[3] + self.copied * x[4]
        hosts = self.messages * x[5] + self.host * x[6] + self.host_reduced * x[3] + self.host_copied * x[4]
        return np.asarray(x[0] + np.maximum(links, hosts * (1 + x[7] * self.crowd)))

    def shares(self, x: Array) -> Array:
        """Return the largest share of each constant in any modelled time.

        The share of `crowding` is relative to the time of the host's work, not to the whole time.
        """
        columns = (np.ones_like(self.link), self.steps, self.link, self.reduced, self.copied, self.messages, self.host)
        times = self.times(x)
        found = [float((column * x[i] / times).max()) for i, column in enumerate(columns)]
        return np.array([*found, float((self.crowd * x[7]).max()), float((self.rank * x[8] / times).max())])

    def starts(self) -> list[Array]:
        """Return three sets of starting values (logarithms): most time in the links, in the ranks, or in the hosts."""
        ones = self.steps >= 1
        alpha = float(np.min(self.seconds[ones] / self.steps[ones])) if ones.any() else float(self.seconds.min())
        big = self.link >= np.quantile(self.link, 0.75)
        link, host, rank = (
            float(np.median(self.seconds[big] / np.maximum(column[big], 1.0)))
            for column in (self.link, self.host, self.rank)
        )
        small = (alpha / 2, alpha / 2)
        return [
            np.log([*small, link * much, link / 4, link / 4, alpha / 8, host * some, FIRST_CROWDING, rank * rest])
            for much, some, rest in ((0.7, 0.2, 0.1), (0.3, 0.7, 0.1), (0.1, 0.5, 0.7))
        ]

    def _errors(self, logs: Array, free: list[int]) -> Array:
        x = np.zeros(len(NAMES))
        x[free] = np.exp(logs[free])
        return np.asarray(np.log(self.times(x) / self.seconds))

    def solve(self, start: Array, free: list[int]) -> tuple[Array, float]:
        """Return the logarithms of the constants with the smallest weighted sum of squares, and that sum."""
        logs, damping = start.copy(), 1e-2
        errors = self._errors(logs, free)
        for _ in range(ITERATIONS):
            limit = HUBER * max(1.4826 * float(np.median(np.abs(errors))), FLOOR)
            slope = np.empty((len(errors), len(free)))
            for column, index in enumerate(free):
                moved = logs.copy()
                moved[index] += STEP
                slope[:, column] = (self._errors(moved, free) - errors) / STEP
            weights = np.minimum(1.0, limit / np.maximum(np.abs(errors), 1e-12))
            curvature = slope.T @ (weights[:, None] * slope)
            damped = curvature + damping * (np.diag(np.diag(curvature)) + 1e-3 * np.eye(len(free)))
            step = np.clip(np.linalg.solve(damped, -slope.T @ (weights * errors)), -1.0, 1.0)
            trial = logs.copy()
            trial[free] += step
            there = self._errors(trial, free)
            gain = _huber(errors, limit) - _huber(there, limit)
            if gain > 0:
                logs, errors, damping = trial, there, max(damping / 3, 1e-7)
                if gain < 1e-7 * len(errors):
                    break
            else:
                damping *= 4
                if damping > 1e7:
                    break
        return logs, _huber(errors, HUBER * 5 * FLOOR)


def _huber(errors: Array, limit: float) -> float:
    size = np.abs(errors)
    return float(np.where(size <= limit, size**2, 2 * limit * size - limit**2).sum())
