"""The time of one operation in one world by its size: a line, pieces of lines, or points around a line. Pure.

`collectives_bench/cost/pieces.py` fits them; here they are only read, without numpy, so that `muster predict` starts
quickly. A curve holds what was measured; points around a line are drawn again from that.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from muster.collectives_bench.sizes import size_text
from muster.jobs.spec.strict import Strict

Kind = Literal["line", "pieces", "points", "smooth"]
Points = tuple[tuple[int, float], ...]  # bytes, seconds; by size, sizes differ

FAR: Final = 4.0  # beyond this many times the largest measured size, a prediction is a guess
REACH: Final = 1.0  # doublings of size within which a neighbour counts (standard deviation)
DRAWN: Final = 0.3  # the line's weight against a point's own, 1
SAME: Final = 0.005  # what a curve may be off a measured time and still be called it: less than times repeat to
WORDS: Final[dict[Kind, str]] = {
    "line": "on a line through all sizes",
    "pieces": "on lines through several sizes",
    "points": "drawn so as not to fall with size",
    "smooth": "smoothed over its neighbours",
}


class Errors(Strict):
    """Relative errors |predicted - measured| / measured of points that the fit had not seen."""

    points: int
    mean: float
    median: float
    largest: float
    within_10: float  # share of points
    within_20: float


class Piece(Strict):
    """`alpha_s + S * beta_s` for S up to `upto_bytes`; None: without end."""

    alpha_s: float
    beta_s: float
    upto_bytes: float | None = None

    def seconds(self, nbytes: float) -> float:
        """Return the time of a size."""
        return self.alpha_s + nbytes * self.beta_s


class Curve(Strict):
    """One operation in one world; 90 % of what is measured should lie within `seconds * low` and `seconds * high`."""

    operation: str
    nodes: int
    ranks: int
    backend: str
    device: str
    dtype: str
    place: str
    call: str = "sync"
    back_to_back: bool = False  # one call behind the other, without a barrier between
    kind: Kind
    pieces: list[Piece] = Field(min_length=1)
    points: list[tuple[int, float]] = Field(min_length=1)  # bytes, seconds at the sizes that were measured; by size
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
            raise ValueError("points must have times of more than 0 s")
        if not 0 < self.low <= self.high:
            raise ValueError(f"low and high must be more than 0, in this order, got {self.low} and {self.high}")
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
        return seconds_at(self.kind, self.pieces, self._drawn, nbytes)

    @cached_property
    def _drawn(self) -> Points:
        return drawn(self.kind, tuple(self.points), self.pieces[0])

    def how(self, nbytes: float) -> str:
        """Say what the prediction rests on.

        At a measured size it is the curve all the same: left-out launches lie as near to it as to the median of the
        others there, or nearer, and it does not jump.
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


def seconds_at(kind: Kind, pieces: Sequence[Piece], points: Sequence[tuple[float, float]], nbytes: float) -> float:
    """Return the time of S bytes; never less than that of fewer bytes."""
    if kind in ("points", "smooth"):
        return around(points, pieces[0], nbytes)
    found = 0.0
    for piece in pieces:
        if piece.upto_bytes is None or nbytes <= piece.upto_bytes:
            return max(found, piece.seconds(nbytes))
        found = max(found, piece.seconds(piece.upto_bytes))
    return found


def around(points: Sequence[tuple[float, float]], line: Piece, nbytes: float) -> float:
    """Return the line's time, times how far points lie from it: straight in log size between them, as far outside."""
    place = bisect_left(points, (nbytes, 0.0))
    if place in (0, len(points)):
        size, took = points[0] if place == 0 else points[-1]
        return took * line.seconds(nbytes) / line.seconds(size)
    (below, below_s), (above, above_s) = points[place - 1], points[place]
    share = math.log(nbytes / below) / math.log(above / below)
    ratio = (below_s / line.seconds(below)) ** (1 - share) * (above_s / line.seconds(above)) ** share
    return float(min(max(line.seconds(nbytes) * ratio, below_s), above_s))


def drawn(kind: Kind, points: Points, piece: Piece) -> Points:
    """Return the points that a curve of a kind goes through, from those that were measured."""
    if kind == "smooth":
        points = smoothed(points, piece)
    return monotone(points) if kind in ("points", "smooth") else points


def monotone(points: Points) -> Points:
    """Make times never fall with size: pool neighbours that do, in log time (Ayer and others, 1955)."""
    pools: list[tuple[float, list[int]]] = []  # mean of log time, sizes
    for size, took in points:
        pools.append((math.log(took), [size]))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (mean, sizes), (before, earlier) = pools.pop(), pools.pop()
            total = len(sizes) + len(earlier)
            pools.append(((mean * len(sizes) + before * len(earlier)) / total, earlier + sizes))
    own = dict(points)  # exact, where nothing was pooled
    return tuple((size, math.exp(mean) if sizes[1:] else own[size]) for mean, sizes in pools for size in sizes)


def smoothed(points: Points, piece: Piece) -> Points:
    """Draw points towards the line and their neighbours: a kernel estimate of log(time / line) over log2 S."""
    logs = [math.log2(size) for size, _ in points]
    away = [math.log(took / piece.seconds(size)) for size, took in points]
    found = []
    for (size, _), here in zip(points, logs, strict=True):
        weights = [math.exp(-(((here - there) / REACH) ** 2) / 2) for there in logs]
        mean = sum(w * z for w, z in zip(weights, away, strict=True)) / (sum(weights) + DRAWN)
        found.append((size, piece.seconds(size) * math.exp(mean)))
    return tuple(found)


def time_text(time_s: float) -> str:
    """Write a time with the unit that suits it."""
    for unit, width in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if time_s >= width:
            return f"{time_s / width:.4g} {unit}"
    return f"{time_s * 1e6:.3g} us"
