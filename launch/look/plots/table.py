"""The numbers of a plot as a table, with the same digits as in `muster compare`."""

from collections.abc import Callable, Mapping
from typing import Final

from muster.launch.common import screen
from muster.launch.look.plots.lane_text import drawing
from muster.launch.look.plots.series import Plot, PlotSeries

FORMATS: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {  # by unit
    "s": ("ms", lambda value: f"{1e3 * value:.2f}"),
    "B": ("MB", lambda value: f"{value / (1 << 20):,.0f}"),
    "share": ("", lambda value: f"{value:.2f}"),
    "": ("", lambda value: f"{value:.4f}"),
}


def render(plot: Plot) -> str:
    """Format every panel as a table with a row for each x and a column for each series. Nothing is thinned."""
    return "\n\n".join(drawing(panel) if panel.style == "lanes" else _text(*grid(panel)) for panel in plot.panels)


def grid(plot: Plot) -> tuple[str, list[str], list[list[str | None]]]:
    """Return the heading of one panel, its columns, and a row for each x."""
    unit, text = FORMATS.get(plot.unit, (plot.unit, lambda value: f"{value:,.0f}"))
    series = [each for each in plot.series if plot.unit != "share" or each.role != "reference"]
    columns = [{str(x): place for place, x in enumerate(each.x)} for each in series]
    every = dict.fromkeys(x for each in series for x in each.x)
    names = sorted(every, key=float) if plot.style == "lines" else list(every)
    rows = [
        [_name(x), *(_cell(each, places.get(str(x)), text) for each, places in zip(series, columns, strict=True))]
        for x in names
    ]
    head = f"{plot.title}: {plot.y_label}{f' in {unit}' if unit else ''}{f'; {plot.note}' if plot.note else ''}"
    heads = [plot.x_label + ">" if plot.style == "lines" else "run", *(f"{each.label}>" for each in series)]
    return head, heads, rows


def _text(head: str, columns: list[str], rows: list[list[str | None]]) -> str:
    return f"{head}\n\n{screen.table(columns, rows)}"


def _name(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.0f}"


def _cell(series: PlotSeries, place: int | None, text: Callable[[float], str]) -> str | None:
    if place is None:
        return None
    value = text(series.y[place])
    if series.low is None or series.high is None:
        return value
    return f"{value} ({text(series.low[place])} to {text(series.high[place])})"
