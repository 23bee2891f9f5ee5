"""Thin a long line for drawing: the smallest and the largest value of each of its parts stay. Pure."""

from dataclasses import replace
from typing import Final

from muster.launch.look.plots.series import Series

MOST_POINTS: Final = 1000


def thinned(series: Series) -> Series:
    """Return a line of at most about 1,000 points; a band keeps its lowest and highest ends of each part."""
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
