"""Tables of a page: texts in rows, with what a screen reader says of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster.launch.look.plots.panels import SCALES
from muster.launch.look.plots.series import Plot

MOST_CELLS: Final = 40_000  # of a plot's numbers; a page of more is slow to open


@dataclass(frozen=True)
class Table:
    """A caption, headings (a trailing > aligns a column to the right), rows. The first cell of a row is its heading."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Build a table from values; a dash stands for None."""
    cells = (tuple("-" if cell is None else str(cell) for cell in row) for row in rows)
    return Table(caption, tuple(columns), tuple(cells))


def numbers_of(plot: Plot) -> list[Table]:
    """Return the numbers of a plot, a table for each panel, in the units of its axis."""
    return [_numbers(panel) for panel in plot.panels]


def grid_of(plot: Plot) -> tuple[list[str], list[list[str | float | None]]]:
    """Return the numbers of one panel as they were measured: headings, and a row for each x."""
    columns, found = [plot.x_label or "run"], dict[str | float, dict[int, float]]()
    for series in plot.series:
        for name, values in (("", series.y), (" from", series.low), (" to", series.high)):
            if values is not None:
                for x, value in zip(series.x, values, strict=True):
                    found.setdefault(x, {})[len(columns)] = value
                columns.append(series.label + name)
    places = range(1, len(columns))
    return columns, [[x, *(values.get(place) for place in places)] for x, values in found.items()]


def _numbers(plot: Plot) -> Table:
    unit, scale = SCALES.get(plot.unit, (plot.unit, 1.0))
    columns, rows = grid_of(plot)
    every = -(-len(rows) * len(columns) // MOST_CELLS)
    caption = f"{plot.title}{f', {unit}' if unit else ''}"
    caption += f" (every {every}th row; --files writes all)" if every > 1 else ""
    shown = ([_text(row[0]), *(_scaled(value, scale) for value in row[1:])] for row in _thinned(rows, every))
    return table(caption, [columns[0], *(f"{name}>" for name in columns[1:])], shown)


def _thinned(rows: Sequence[list[str | float | None]], every: int) -> Sequence[list[str | float | None]]:
    return rows[:: max(every, 1)]


def _scaled(value: str | float | None, scale: float) -> str | None:
    return _text(value * scale) if isinstance(value, float | int) else value


def _text(value: str | float | None) -> str | None:
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else None if value is None else str(value)
