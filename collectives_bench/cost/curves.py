"""Fit time against message size for one operation in one world, as a line or as points around a line. Pure.

    line      alpha + S beta: least squares of relative errors, alpha and beta >= 0, with Huber's weights
    points    the line, multiplied by the measured points' ratio to it; interpolated in log size, made monotone

Errors are *relative*, because with absolute errors the largest size would dominate the fit. Huber's weights (1964) are
iterated, so that one bad size does not distort the rest. Points are used because protocols change with size; NCCL's
`tuning.cc` also corrects its line by a table of sizes. Each curve uses the kind (line or points) with the smaller mean
error in leave-one-out tests over sizes (`heldout.py`); if times vary much, this is usually the line. Piecewise lines
and smoothed points were tried and do not predict better. A curve stores the measurements, from which its points are
recomputed. This module does not import numpy, so that `muster predict` starts quickly.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from muster.collectives_bench.sizes import size_text, time_text
from muster.jobs.spec.strict import Strict

Kind = Literal["line", "points"]
Points = tuple[tuple[int, float], ...]  # (bytes, seconds) in order of size, each size once

FAR: Final = 4.0  # predictions beyond this multiple of the largest measured size get a warning
SAME: Final = 0.005  # relative difference below which a curve equals a measured time
LEAST_SIZES: Final = 3  # two sizes define a line, and a third size shows its error
HUBER: Final = 1.345  # this value has 95 % efficiency for normally distributed errors
ITERATIONS: Final = 12
SETTLED: Final = 1e-3  # largest change of a weight at the end of the iteration
WORDS: Final[dict[Kind, str]] = {"line": "on a line through all sizes", "points": "averaged with neighbouring sizes"}
FLOOR: Final = 0.01  # fits with smaller relative errors are equally good: measurements are no better


class Errors(Strict):
    """The relative errors |predicted - measured| / measured of points that were held out of the fit."""

    points: int
    mean: float
    median: float
    largest: float
    within_10: float  # share of points with an error of 10 % at most
    within_20: float


class CostLine(Strict):
    """The line `alpha_s + S * beta_s`, in seconds for S bytes."""

    alpha_s: float
    beta_s: float

    def seconds(self, nbytes: float) -> float:
        """Return the time for a size."""
        return self.alpha_s + nbytes * self.beta_s


@dataclass(frozen=True)
class Fitted:
    """A line, or points around it whose times never decrease with size. Without points, the curve is the line."""

    line: CostLine
    points: Points

    def seconds(self, nbytes: float) -> float:
        """Return the line's time multiplied by the points' ratio to it (interpolated in log size, constant beyond)."""
        points, line = self.points, self.line
        if not points:
            return line.seconds(nbytes)
        place = bisect_left(points, (nbytes, 0.0))
        if place in (0, len(points)):
            size, took = points[0] if place == 0 else points[-1]
            return took * line.seconds(nbytes) / line.seconds(size)
        (below, below_s), (above, above_s) = points[place - 1], points[place]
        share = math.log(nbytes / below) / math.log(above / below)
        ratio = (below_s / line.seconds(below)) ** (1 - share) * (above_s / line.seconds(above)) ** share
        return float(min(max(line.seconds(nbytes) * ratio, below_s), above_s))


class Key(Strict):
    """The operation and the world that a curve describes."""

    operation: str
    nodes: int
    ranks: int
    backend: str
    device: str
    dtype: str
    place: str
    call: str = "sync"
    back_to_back: bool = False  # True: the calls had no barrier between them


class Curve(Key):
    """The times of one key. 90 % of measurements should lie between `seconds * low` and `seconds * high`."""

    kind: Kind
    line: CostLine
    points: list[tuple[int, float]] = Field(min_length=1)  # bytes and seconds, in order of size
    low: float = 1.0
    high: float = 1.0
    held_out: Errors | None = None

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"{self.ranks} ranks cannot be on {self.nodes} nodes")
        sizes = [size for size, _ in self.points]
        if sizes != sorted(set(sizes)) or sizes[0] < 0:
            raise ValueError("points must be in order of size, each size once")
        if any(not seconds > 0 for _, seconds in self.points):
            raise ValueError("the times of points must be more than 0 s")
        if not 0 < self.low <= self.high:
            raise ValueError(f"low must be more than 0, and high must be at least low, got {self.low} and {self.high}")
        return self

    @property
    def smallest(self) -> int:
        """The smallest size that was measured, in bytes."""
        return self.points[0][0]

    @property
    def largest(self) -> int:
        """The largest size that was measured, in bytes."""
        return self.points[-1][0]

    def seconds(self, nbytes: float) -> float:
        """Return the predicted time of S bytes."""
        return self._fitted.seconds(nbytes)

    @cached_property
    def _fitted(self) -> Fitted:
        return drawn(self.kind, self.line, self.points)

    def how(self, nbytes: float) -> str:
        """Describe the basis of the prediction.

        Even measured sizes are predicted from the curve. The curve predicts held-out launches at least as well as the
        median of the other launches, and it has no jumps.
        """
        sizes = [size for size, _ in self.points]
        place = bisect_left(sizes, nbytes)
        if place < len(sizes) and sizes[place] == nbytes:
            measured = self.points[place][1]
            if abs(self.seconds(nbytes) / measured - 1) <= SAME:
                return "measured at this size"
            return f"{WORDS[self.kind]}; measured here {time_text(measured)}"
        if place == 0:
            return f"below {size_text(sizes[0])}, the smallest measured"
        if place == len(sizes):
            return f"beyond {size_text(sizes[-1])}, the largest measured"
        return f"between {size_text(sizes[place - 1])} and {size_text(sizes[place])}"


def drawn(kind: Kind, line: CostLine, points: Sequence[tuple[int, float]]) -> Fitted:
    """Return a line, or points around it, according to `kind`."""
    return Fitted(line, monotone(points) if kind == "points" else ())


def line_of(points: Points) -> CostLine:
    """Fit alpha and beta by iterated least squares of relative errors with Huber's weights."""
    rows = [(1 / took, size / took) for size, took in points]
    weights = [1.0] * len(rows)
    alpha, beta = _solve(rows, weights)
    for _ in range(ITERATIONS):
        errors = [abs(alpha * one + beta * size - 1) for one, size in rows]
        limit = HUBER * max(1.4826 * median(errors), FLOOR)
        fresh = [1.0 if error <= limit else limit / error for error in errors]
        if all(abs(new - old) < SETTLED for new, old in zip(fresh, weights, strict=True)):
            break
        weights = fresh
        alpha, beta = _solve(rows, weights)
    return CostLine(alpha_s=alpha, beta_s=beta)


def _solve(rows: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Minimise sum w (alpha / t + beta S / t - 1)^2 for alpha, beta >= 0."""
    aa = ab = bb = a = b = 0.0
    for (one, size), weight in zip(rows, weights, strict=True):
        aa, ab, bb = aa + weight * one * one, ab + weight * one * size, bb + weight * size * size
        a, b = a + weight * one, b + weight * size
    determinant = aa * bb - ab * ab
    if bb == 0 or determinant <= 1e-12 * aa * bb:  # with a single size, alpha is the whole time
        return a / aa, 0.0
    alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if alpha < 0:
        return 0.0, b / bb
    return (a / aa, 0.0) if beta < 0 else (alpha, beta)


def monotone(points: Sequence[tuple[int, float]]) -> Points:
    """Average the log times of neighbouring sizes until no time decreases with size (Ayer et al. 1955)."""
    pools: list[tuple[float, list[int]]] = []  # mean log time, number of sizes
    for size, took in points:
        pools.append((math.log(took), [size]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (mean, sizes), (before, earlier) = pools.pop(), pools.pop()
            total = len(sizes) + len(earlier)
            pools.append(((mean * len(sizes) + before * len(earlier)) / total, earlier + sizes))
    own = dict(points)  # sizes that were not averaged keep their exact times
    return tuple((size, math.exp(mean) if sizes[1:] else own[size]) for mean, sizes in pools for size in sizes)


def short(number: float) -> float:
    """Round a number to the digits that a file needs."""
    return float(f"{number:.5g}")
