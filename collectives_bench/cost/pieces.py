"""Fit the time of one operation in one world against its size: candidates, and the choice among them. Pure.

    line     alpha + S beta                     relative errors, alpha and beta >= 0, Huber's weights
    pieces   two or three lines                 break points by exhaustive search, their number by BIC
    points   a line, times how far the measured points lie from it; straight in log size between them, made monotone
    smooth   the same, with each point's distance averaged with its neighbours' and drawn to the line

Least squares of *relative* errors: with absolute ones the largest size owns the fit. Huber's weights (1964), iterated:
one bad size must not bend the rest. NCCL's `tuning.cc` corrects its own line by a table of sizes, for protocols switch;
hence pieces and points. The choice is the smallest mean error of sizes left out one at a time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from statistics import median
from typing import Final

from muster.collectives_bench.cost.curves import Kind, Piece, Points, drawn, seconds_at

HUBER: Final = 1.345  # 95 % efficient for normal errors
ITERATIONS: Final = 12
SETTLED: Final = 1e-3  # change of a weight
FLOOR: Final = 0.01  # relative error below which fits are equally good: no measurement is better
LEAST_SIZES: Final = 3  # two make a line, and the third says whether it is one
PIECE_SIZES: Final = 3  # points of a piece: two make a line through whatever noise they have
MOST_PIECES: Final = 3
SIMPLER: Final = 1.02  # a candidate further down the list must be better by more than this
ROUNDING: Final = 1e-9  # of errors of times that lie on a line exactly


@dataclass(frozen=True)
class Fitted:
    """One candidate, fitted."""

    kind: Kind
    pieces: tuple[Piece, ...]
    points: Points

    def seconds(self, nbytes: float) -> float:
        """Return the predicted time of S bytes."""
        return seconds_at(self.kind, self.pieces, self.points, nbytes)


def line(points: Points, upto: float | None = None) -> Piece:
    """Fit alpha and beta: least squares of relative errors, weighted again and again by Huber's weights."""
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
    return Piece(alpha_s=alpha, beta_s=beta, upto_bytes=upto)


def _solve(rows: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Minimise sum w (alpha / t + beta S / t - 1)^2 for alpha, beta >= 0."""
    aa = ab = bb = a = b = 0.0
    for (one, size), weight in zip(rows, weights, strict=True):
        aa, ab, bb = aa + weight * one * one, ab + weight * one * size, bb + weight * size * size
        a, b = a + weight * one, b + weight * size
    determinant = aa * bb - ab * ab
    if bb == 0 or determinant <= 1e-12 * aa * bb:  # one size: all of it is alpha
        return a / aa, 0.0
    alpha, beta = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if alpha < 0:
        return 0.0, b / bb
    return (a / aa, 0.0) if beta < 0 else (alpha, beta)


def pieces_at(points: Points, breaks: Sequence[int]) -> tuple[Piece, ...]:
    """Fit a line to each run of points; `breaks` are the indices at which a new one begins."""
    edges = [0, *breaks, len(points)]
    found = []
    for first, last in pairwise(edges):
        upto = None if last == len(points) else math.sqrt(points[last - 1][0] * points[last][0])
        found.append(line(points[first:last], upto))
    return tuple(found)


@lru_cache(maxsize=4096)
def best_breaks(points: Points) -> tuple[int, ...]:
    """Choose number and place of the break points by BIC: m ln(mean error^2) + (parameters) ln m.

    A break counts for two parameters: it was searched for, and with few points some place always looks like one.
    """
    count = len(points)
    cache: dict[tuple[int, int], float] = {}

    def badness(first: int, last: int) -> float:
        if (first, last) not in cache:
            piece = line(points[first:last])
            errors = [min(abs(piece.seconds(size) / took - 1), 1.0) for size, took in points[first:last]]
            cache[first, last] = sum(error**2 for error in errors)
        return cache[first, last]

    best: tuple[int, ...] = ()
    best_score = float("inf")
    for number in range(MOST_PIECES):
        for breaks in combinations(range(PIECE_SIZES, count - PIECE_SIZES + 1), number):
            edges = [0, *breaks, count]
            runs = list(pairwise(edges))
            if any(last - first < PIECE_SIZES for first, last in runs) and number:
                continue
            total = sum(badness(first, last) for first, last in runs)
            score = count * math.log(total / count + FLOOR**2) + (4 * number + 2) * math.log(count)
            if score < best_score:
                best, best_score = breaks, score
    return best


def _line(points: Points) -> Fitted:
    return Fitted("line", (line(points),), points)


def _pieces(points: Points) -> Fitted:
    return Fitted("pieces", pieces_at(points, best_breaks(points)), points)


def _points(points: Points) -> Fitted:
    piece = line(points)
    return Fitted("points", (piece,), drawn("points", points, piece))


def _smooth(points: Points) -> Fitted:
    piece = line(points)
    return Fitted("smooth", (piece,), drawn("smooth", points, piece))


CANDIDATES: Final[dict[Kind, Callable[[Points], Fitted]]] = {
    "line": _line,
    "pieces": _pieces,
    "smooth": _smooth,
    "points": _points,
}


def left_out(points: Points, candidate: Callable[[Points], Fitted]) -> list[tuple[float, float]]:
    """Predict every size but the first and the last from the others: [(predicted, measured)]."""
    found = []
    for place in range(1, len(points) - 1):
        size, took = points[place]
        found.append((candidate(points[:place] + points[place + 1 :]).seconds(size), took))
    return found


def mean_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean of |predicted - measured| / measured."""
    return sum(abs(predicted / measured - 1) for predicted, measured in pairs) / len(pairs) if pairs else 0.0


def choose(points: Points) -> Fitted:
    """Return the candidate that predicts left-out sizes best; the simpler one where that makes no difference."""
    best: Callable[[Points], Fitted] = _line
    best_error = math.inf
    if len(points) >= LEAST_SIZES:
        for candidate in CANDIDATES.values():
            error = mean_error(left_out(points, candidate))
            if error * SIMPLER + ROUNDING < best_error:
                best, best_error = candidate, error
    return best(points)
