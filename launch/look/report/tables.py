"""Tables of a report, with captions and headings for screen readers."""

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from muster.launch.look.plots.series import Plot, PlotSeries
from muster.launch.look.plots.table import grid

MOST_CELLS: Final = 40_000  # maximum number of cells in a plot's table, because a larger page opens slowly


@dataclass(frozen=True)
class Table:
    """A table of text. A column whose heading ends in > is aligned right. The first cell of a row is its heading."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Build a table from values; None becomes a dash."""
    cells = (tuple("-" if cell is None else str(cell) for cell in row) for row in rows)
    return Table(caption, tuple(columns), tuple(cells))


def numbers_of(plot: Plot) -> list[Table]:
    """Return the numbers of a plot as in `muster plot`, one table per panel."""
    return [_numbers(*grid(_totals(panel) if panel.style == "lanes" else panel)) for panel in plot.panels]


def as_csv(plot: Plot) -> str:
    """Format the unrounded numbers of a plot as CSV, one line per point."""
    written = io.StringIO()
    lines = csv.writer(written, lineterminator="\n")
    lines.writerow(("panel", "series", "x", "y", "low", "high"))
    for panel in plot.panels:
        for each in panel.series:
            none = (None,) * len(each.x)
            points = zip(each.x, each.y, each.low or none, each.high or none, strict=True)
            lines.writerows((panel.title, each.label, *point) for point in points)
    return written.getvalue()


def _totals(plot: Plot) -> Plot:
    """Return a timeline as bars, with the total duration of each kind in each lane."""
    series = []
    for each in plot.series:
        lasted_s = dict.fromkeys(each.x, 0.0)
        for lane, seconds in zip(each.x, each.y, strict=True):
            lasted_s[lane] += seconds
        series.append(PlotSeries(each.label, tuple(lasted_s), tuple(lasted_s.values())))
    return replace(plot, style="bars", series=tuple(series))


def _numbers(head: str, columns: list[str], rows: list[list[str | None]]) -> Table:
    every = -(-len(rows) * len(columns) // MOST_CELLS)
    if every > 1:
        head += f" (one row in {every}; --files writes all)"
    return table(head, columns, rows[:: max(every, 1)])
