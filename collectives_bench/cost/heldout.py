"""The model's error on data held out of the fit: single sizes and whole worlds. The functions are pure; the module uses
numpy.

For the reported errors, a held-out size is also ignored in the choice between line and points. The first and the last
size of a curve are never held out, because their prediction would be an extrapolation, about which a profile warns
anyway.
"""

import math
import random
from collections.abc import Sequence
from statistics import median
from typing import Final

from muster.collectives_bench.cost.curves import LEAST_SIZES, Errors, Fitted, Kind, Points, drawn, line_of, short

Pair = tuple[float, float]  # predicted and measured seconds
Samples = tuple[tuple[int, tuple[float, ...]], ...]  # (bytes, median of each launch in seconds), in order of size

DRAWS: Final = 24  # number of times that launches are drawn with replacement
COVERAGE: Final = 0.90
SHRINK: Final = 4.0  # weight of the common spread of all curves, as a number of sizes of one curve
LEAST_SPREAD: Final = 0.01
SIMPLER: Final = 1.02  # points are chosen only if the line's error is larger by this factor
ROUNDING: Final = 1e-9  # smaller errors are rounding errors of times that lie exactly on a line


def errors_of(pairs: Sequence[Pair]) -> Errors | None:
    """Summarize |predicted - measured| / measured; None without pairs."""
    found = sorted(abs(predicted / measured - 1) for predicted, measured in pairs if measured > 0)
    if not found:
        return None
    return Errors(
        points=len(found),
        mean=short(sum(found) / len(found)),
        median=short(median(found)),
        largest=short(found[-1]),
        within_10=short(sum(error <= 0.1 for error in found) / len(found)),
        within_20=short(sum(error <= 0.2 for error in found) / len(found)),
    )


def mean_error(pairs: Sequence[Pair]) -> float:
    """Return the mean of |predicted - measured| / measured."""
    return sum(abs(predicted / measured - 1) for predicted, measured in pairs) / len(pairs) if pairs else 0.0


def fitted(points: Points, kind: Kind | None = None) -> Fitted:
    """Fit a line or points around it. Without `kind`, use the kind that predicts held-out sizes better."""
    return drawn(kind or choose(points), line_of(points), points)


def choose(points: Points) -> Kind:
    """Return the kind that predicts held-out sizes better, or the line if both are equally good."""
    if len(points) < LEAST_SIZES:
        return "line"
    line, around = (mean_error(sizes_left_out(points, kind)) for kind in ("line", "points"))
    return "points" if around * SIMPLER + ROUNDING < line else "line"


def sizes_left_out(points: Points, kind: Kind | None = None, measured: Points = ()) -> list[Pair]:
    """Return (predicted, measured) for each size except the first and last one, predicted from the other sizes.

    Measured times are taken from `measured`, by default from `points`.
    """
    return [
        (fitted(points[:place] + points[place + 1 :], kind).seconds(size), took)
        for place, (size, took) in list(enumerate(measured or points))[1:-1]
    ]


def medians(samples: Samples) -> Points:
    """Return the median over launches at every size."""
    return tuple((size, median(launches)) for size, launches in samples)


def residuals(samples: Samples, kind: Kind, seed: int) -> list[float]:
    """Return samples of log(measured / predicted): resample launches, and predict each size from the other sizes.

    Held-out sizes show the model's error. Resampled launches show the noise of prediction and measurement (Efron's
    bootstrap, 1979). With too few sizes to hold one out, the samples only show the noise.
    """
    draw, found = random.Random(seed), []
    for _ in range(DRAWS):
        fitting, fresh = _drawn(samples, draw), _drawn(samples, draw)
        if len(samples) < 4:
            found += [math.log(b / a) for (_, a), (_, b) in zip(fitting, fresh, strict=True)]
        else:
            found += [math.log(took / predicted) for predicted, took in sizes_left_out(fitting, kind, fresh)]
    return found


def _drawn(samples: Samples, draw: random.Random) -> Points:
    return tuple((size, median(draw.choices(launches, k=len(launches)))) for size, launches in samples)


def intervals(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return, for each curve, the factor h such that 90 % of its residuals lie within 1 / h and h.

    A single curve has too few sizes for a quantile. So the spread of its residuals is estimated first, and shrunk
    towards the common spread of all curves. Then all residuals are divided by the spread of their curve and pooled. The
    90 % quantile of the pool, times the spread of a curve, is log(h).
    """
    everything = [abs(each) for curve in curves for each in curve]
    if not everything:
        return [1.0 for _ in curves]
    common = max(median(everything), LEAST_SPREAD)
    spreads = []
    for curve in curves:
        sizes = max(len(curve) / DRAWS, 1.0)
        own = median(map(abs, curve)) if curve else common
        spreads.append(max(math.exp((sizes * _log(own) + SHRINK * _log(common)) / (sizes + SHRINK)), LEAST_SPREAD))
    scaled = sorted(abs(each) / spread for curve, spread in zip(curves, spreads, strict=True) for each in curve)
    quantile = scaled[min(math.ceil(COVERAGE * len(scaled)), len(scaled)) - 1]
    return [math.exp(quantile * spread) for spread in spreads]


def _log(spread: float) -> float:
    return math.log(max(spread, LEAST_SPREAD))


def quantiles(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return an interval (low, high) that contains 90 % of measured / predicted, and also 1."""
    ratios = sorted(measured / predicted for predicted, measured in pairs)
    cut = (1 - COVERAGE) / 2 * (len(ratios) - 1)
    low, high = ratios[math.floor(cut)], ratios[math.ceil(len(ratios) - 1 - cut)]
    return short(min(low, 1.0)), short(max(high, 1.0))
