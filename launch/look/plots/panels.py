"""Painters for one panel of a plot: stacked bars, bars, or lines.

Bars are horizontal, so that long names do not overlap. Series differ in lightness, hatch, marker and line style, so
that they remain distinguishable in grayscale.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.terminal import printable
from muster.launch.look.plots.series import Plot, PlotSeries
from muster.launch.look.plots.thin import thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: Final = ("#56b4e9", "#0072b2", "#e69f00", "#009e73", "#d9d9d9", "#cc79a7", "#d55e00", "#999999")
INK: Final = "#000000"
GRID: Final = "#b0b0b0"
FAINT: Final = 0.25  # opacity of a band
HATCHES: Final = ("..", "", "///", "\\\\\\", "", "xx", "++", "oo")
MARKERS: Final = "osD^vPX*"
DASHES: Final = ("-", "--", "-.", ":")
LINE_COLORS: Final = (1, 2, 3, 6, 5, 0, 7)  # indices into COLORS, without the lightest colour
SCALES: Final = {"s": ("ms", 1e3), "B": ("MB", 1 / (1 << 20)), "share": ("%", 100.0)}
MOST_LETTERS: Final = 40
INTERVALS: Final[Mapping[str, Any]] = {"fmt": "none", "elinewidth": 1.0, "capsize": 3}
WIDE_RANGE: Final = 8  # ratio of the largest to the smallest number of ranks above which axes are logarithmic


def shortened(text: str, most: int = MOST_LETTERS) -> str:
    """Escape invisible characters, and drop the middle of long names, which often differ at their ends."""
    text = printable(text)
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _bars(axes: "Axes", plot: Plot) -> dict[str, Any]:
    """Draw stacked bars or bars beside each other; return the legend's entries."""
    from matplotlib.ticker import FuncFormatter

    handles, places, stacked = dict[str, Any](), places_of(plot), plot.style == "stacked"
    unit, scale = SCALES.get(plot.unit, (plot.unit, 1.0))
    taken = dict.fromkeys(places, 0.0)  # {name: the height of its stack so far, or the number of its bars so far}
    height = 0.8 / beside(plot)
    for number, series in enumerate(plot.series):
        names, values = [str(x) for x in series.x], [scale * value for value in series.y]
        y = [places[name] + (0.0 if stacked else height * (taken[name] + 0.5) - 0.4) for name in names]
        if series.role == "mark":
            (handles[series.label],) = axes.plot(values, y, "d", color=INK, markersize=4)
        else:
            place = number if stacked else 4 if series.role == "reference" else number + 1
            style: dict[str, Any] = {"color": COLORS[place % len(COLORS)], "hatch": HATCHES[place % len(HATCHES)]}
            style |= {"height": 0.9 * height, "edgecolor": INK, "linewidth": 0.5}
            left = [taken[name] for name in names] if stacked else 0.0
            handles[series.label] = axes.barh(y, values, left=left, **style)
            taken |= {name: taken[name] + (value if stacked else 1) for name, value in zip(names, values, strict=True)}
        if ends := _ends(series, scale):
            axes.errorbar(ends[0], y, xerr=ends[1], ecolor=INK, **INTERVALS)
    axes.set_yticks(list(places.values()), [shortened(name) for name in places])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(_with_unit(plot.y_label, unit))
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    axes.grid(axis="x", color=GRID, linewidth=0.5)
    return handles


def _lines(axes: "Axes", plot: Plot) -> dict[str, Any]:
    """Draw lines, with error bars if x is ranks and bands otherwise; return the legend's entries."""
    unit, scale = SCALES.get(plot.unit, (plot.unit, 1.0))
    handles = dict[str, Any]()
    for number, series in enumerate(map(thinned, plot.series)):
        x, y, name = [float(each) for each in series.x], [scale * each for each in series.y], series.label
        style = _style(number, len(x))
        if series.role == "reference":
            style, name = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1.0}, name.partition(",")[0]
        (handles[name],) = axes.plot(x, y, **style)
        if (ends := _ends(series, scale)) and plot.x_label == "ranks":
            axes.errorbar(x, ends[0], yerr=ends[1], ecolor=style["color"], **INTERVALS)
        elif ends:
            low, high = ([scale * each for each in some or ()] for some in (series.low, series.high))
            axes.fill_between(x, low, high, color=style["color"], alpha=FAINT, linewidth=0)
    _name_axes(axes, plot)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(_with_unit(plot.y_label, unit))
    axes.grid(color=GRID, linewidth=0.5)
    return handles


def _style(number: int, points: int) -> dict[str, Any]:
    """Return the style of a line. Later lines are thinner, so that coinciding lines all remain visible."""
    every, colors = max(points // 8, 1), len(LINE_COLORS)
    style: dict[str, Any] = {"color": COLORS[LINE_COLORS[number % colors]], "linewidth": max(3.0 - 0.6 * number, 1.2)}
    style |= {"linestyle": DASHES[number // colors % len(DASHES)], "marker": MARKERS[number % len(MARKERS)]}
    return {**style, "markersize": 5, "markevery": (number % every, every)}


def _name_axes(axes: "Axes", plot: Plot) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    every = [float(x) for each in plot.series for x in each.x]
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if plot.x_label == "ranks" and max(every) > WIDE_RANGE * min(every):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.set_yscale("linear" if plot.unit == "share" else "log")
    if plot.unit == "share":
        axes.set_ylim(0, 105 * max(max(each.y) for each in plot.series))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_number))
        axis.set_minor_formatter(NullFormatter())


PAINTERS: Final = {"stacked": _bars, "bars": _bars, "lines": _lines}


def _ends(series: PlotSeries, scale: float) -> tuple[list[float], list[float]] | None:
    """Return the center and half-width of each interval. A bar shows a mean, which may lie outside its interval."""
    if not series.low or not series.high:
        return None
    ends = list(zip(series.low, series.high, strict=True))
    return [scale * (low + high) / 2 for low, high in ends], [scale * (high - low) / 2 for low, high in ends]


def places_of(plot: Plot) -> dict[str, int]:
    """Return the vertical position of each bar name, counted from the top."""
    return {name: place for place, name in enumerate(dict.fromkeys(str(x) for each in plot.series for x in each.x))}


def beside(plot: Plot) -> int:
    """Return the largest number of bars that one name has side by side."""
    if plot.style == "stacked":
        return 1
    return max(Counter(x for each in plot.series for x in each.x).values(), default=1)


def _with_unit(label: str, unit: str) -> str:
    return shortened(f"{label} ({unit})" if unit else label, 2 * MOST_LETTERS)


def _number(value: float, _: int) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.4g}"
