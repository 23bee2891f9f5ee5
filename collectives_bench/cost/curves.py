"""The time of one operation in one world by its size: a line, pieces of lines, or points around a line. Pure.

`collectives_bench/cost/pieces.py` fits them; here they are only read, without numpy, so that `muster predict` starts
quickly.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Literal

from pydantic import Field

from collectives_bench.sizes import size_text
from jobs.strict import Strict

Kind = Literal["line", "pieces", "points", "smooth"]

FAR: Final = 4.0  # beyond this many times the largest measured size, a prediction is a guess


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
        return seconds_at(self.kind, self.pieces, self.points, nbytes)

    def how(self, nbytes: float) -> str:
        """Say what the prediction rests on."""
        sizes = [size for size, _ in self.points]
        place = bisect_left(sizes, nbytes)
        if place < len(sizes) and sizes[place] == nbytes:
            return "measured at this size"
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
