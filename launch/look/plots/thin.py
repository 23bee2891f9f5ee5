"""Thinning of long lines for drawing, which keeps the smallest and largest value of each segment. Pure."""

from dataclasses import replace
from typing import Final

from muster.launch.look.plots.series import PlotSeries

MOST_POINTS: Final = 1000


def thinned(series: PlotSeries) -> PlotSeries:
    """Return a line of about 1,000 points at most. A band keeps its extremes in each segment."""
    count = len(series.x)
    if count <= MOST_POINTS:
        return series
    parts = MOST_POINTS // 2
    kept: list[int] = []
    low, high = list(series.low or ()), list(series.high or ())
    for part in range(parts):
        places = range(part * count // parts, (part + 1) * count // parts)
        ends = sorted({min(places, key=series.y.__getitem__), max(places, key=series.y.__getitem__)})
        kept += ends
        for ends_of, choose in ((low, min), (high, max)):
            if ends_of:
                end = choose(ends_of[place] for place in places)
                for place in ends:
                    ends_of[place] = end
    kept = sorted({0, *kept, count - 1})
    x, y = tuple(series.x[place] for place in kept), tuple(series.y[place] for place in kept)
    lows, highs = (tuple(ends[place] for place in kept) if ends else None for ends in (low, high))
    return replace(series, x=x, y=y, low=lows, high=highs)
