"""Plot busbw and time against size, or against the number of ranks, on log axes. A band shows a line's interval.

axis    lines                           columns of panels     rows
size    operations and ways             worlds                dtypes, each with busbw above time
ranks   operations and ways, per size   backends              the same
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.sizes import size_text, time_text
from muster.jobs.measuring.figures import NothingToPlotError, drawing

if TYPE_CHECKING:
    from muster.collectives_bench.results.rows import BenchRow

CELL_INCHES: Final = (5.2, 3.1)  # size of one panel
LEGEND_INCHES: Final = 2.4
MARKERS: Final = "os^Dv<>Pph8X*"
MOST_TICKS: Final = 7


@dataclass(frozen=True)
class PlotAxis:
    """The horizontal axis of a plot, and the arrangement of rows.

    `value` returns a row's position on the axis; `column` and `line` name the column of panels and the line in which
    the row is drawn. `text` formats a position.
    """

    label: str
    value: "Callable[[BenchRow], int]"
    column: "Callable[[BenchRow], str]"
    line: "Callable[[BenchRow], str]"
    text: Callable[[int], str]


def plot(rows: "Sequence[BenchRow]", path: Path, axis_name: str = "size") -> None:
    """Draw rows as a plot and write it to a file. `axis_name` is a key of AXES.

    Raises:
        NothingToPlotError: if no row has a size and a time.
        RunFolderError, StorageError: if the file cannot be written.
    """
    drawn = [row for row in rows if row.p50_us is not None and row.nbytes > 0]
    if not drawn:
        raise NothingToPlotError("no row has a size and a time; barrier has no size, and failed rows have no time")
    axis = AXES[axis_name]
    columns = list(dict.fromkeys(map(axis.column, drawn)))
    dtypes = list(dict.fromkeys(row.cell.dtype for row in drawn))
    ways = list(dict.fromkeys(map(axis.line, drawn)))
    width, height = CELL_INCHES[0] * len(columns) + LEGEND_INCHES, CELL_INCHES[1] * 2 * len(dtypes) + 0.4
    with drawing(path, width, height) as figure:
        panels = figure.subplots(2 * len(dtypes), len(columns), squeeze=False, sharex=True, sharey="row")
        for column, title in enumerate(columns):
            for line, dtype in enumerate(dtypes):
                of_panel = [row for row in drawn if axis.column(row) == title and row.cell.dtype == dtype]
                _draw(panels[2 * line][column], of_panel, ways, "busbw", axis)
                _draw(panels[2 * line + 1][column], of_panel, ways, "time", axis)
                panels[2 * line][0].set_ylabel(f"{dtype}\nbusbw (GB/s)" if len(dtypes) > 1 else "busbw (GB/s)")
                panels[2 * line + 1][0].set_ylabel(f"{dtype}\ntime" if len(dtypes) > 1 else "time")
            panels[0][column].set_title(title)
            panels[-1][column].set_xlabel(axis.label)
            _name_values_below(panels[-1][column], sorted(set(map(axis.value, drawn))), axis.text)
        for line in panels:
            _name_values(line[0])
        _legend(figure, panels, ways, confidence=min(row.confidence for row in drawn))


def way_of(row: "BenchRow") -> str:
    """Return the name of a line: the operation, in or out of place if it supports both, and async."""
    cell = row.cell
    words = [cell.operation]
    words += [cell.place] if len(OPERATIONS[cell.operation].places) > 1 else []
    words += ["async"] if cell.call == "async" else []
    return " ".join(words)


def way_and_size(row: "BenchRow") -> str:
    """Return the name of a line over ranks. With several nodes, the name also has the number of ranks per node."""
    per_node = f", {row.world.ranks_per_node}/node" if row.world.nodes > 1 and row.world.ranks_per_node > 1 else ""
    return f"{way_of(row)} {size_text(row.cell.asked_bytes)}{per_node}"


AXES: Final = {
    "size": PlotAxis("size", lambda row: row.nbytes, lambda row: row.world.text, way_of, size_text),
    "ranks": PlotAxis(
        "ranks",
        lambda row: row.world.ranks,
        lambda row: f"{row.world.backend} on {row.world.device}",
        way_and_size,
        str,
    ),
}


def _draw(panel: Any, rows: "Sequence[BenchRow]", ways: Sequence[str], what: str, axis: PlotAxis) -> None:
    """Draw one panel. A way to call an operation has the same colour and marker in all panels."""
    from matplotlib.ticker import FuncFormatter

    for number, way in enumerate(ways):
        of_way = sorted((row for row in rows if axis.line(row) == way), key=axis.value)
        points = [(axis.value(row), *point) for row in of_way if (point := _point(row, what)) is not None]
        if not points:
            continue
        places, values, lows, highs = zip(*points, strict=True)
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
        panel.plot(
            places, values, marker=MARKERS[number % len(MARKERS)], markersize=4, linewidth=1.3, label=way, **style
        )
        panel.fill_between(places, lows, highs, color=style["color"], alpha=0.2, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.grid(True, which="major", alpha=0.3)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda us, _: time_text(us / 1e6) if what == "time" else _plain(us)))


def _point(row: "BenchRow", what: str) -> tuple[float, float, float] | None:
    """Return a value and the ends of its interval, in microseconds or GB/s; None if there is no value to draw."""
    assert row.p50_us is not None
    low, high = row.low_us or row.p50_us, row.high_us or row.p50_us
    if what == "time":
        return (row.p50_us, low, high) if row.p50_us > 0 else None
    if not row.busbw:  # 0 for a single rank, because nothing crosses a link
        return None
    return row.busbw, row.busbw * row.p50_us / high, row.busbw * row.p50_us / low


def _name_values(panel: Any) -> None:
    """Label one value per decade, or three (1, 2 and 5) if the axis spans less than two decades."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = panel.get_ylim()
    subs = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
    panel.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _name_values_below(panel: Any, sizes: Sequence[int], text: Callable[[int], str]) -> None:
    """Label the horizontal axis with as many measured sizes or numbers of ranks as fit, instead of powers of two."""
    least = math.log2(sizes[-1] / sizes[0]) / MOST_TICKS
    chosen = [sizes[-1]]
    for size in reversed(sizes[1:-1]):
        if math.log2(chosen[-1] / size) >= least and math.log2(size / sizes[0]) >= least:
            chosen.append(size)
    chosen = sorted({*chosen, sizes[0]})
    panel.set_xticks(chosen, [text(size) for size in chosen])
    panel.set_xticks([], minor=True)


def _legend(figure: Any, panels: Any, ways: Sequence[str], *, confidence: float) -> None:
    """Draw one legend for all panels, beside them."""
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    named = [way for way in ways if way in handles]
    title = f"band: {confidence:.0%} interval"
    figure.legend([handles[way] for way in named], named, loc="outside right upper", title=title, frameon=False)
