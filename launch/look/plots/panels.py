"""Draw one panel of a plot: stacked bars, bars, or lines.

Bars lie on their side, so that long names never overlap. Series differ in lightness, hatch, marker and line style,
so that they can be told apart in grey.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.terminal import printable
from muster.launch.look.plots.series import Plot, Series
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
LINE_COLORS: Final = (1, 2, 3, 6, 5, 0, 7)  # places in COLORS; the lightest is for areas only
SCALES: Final = {"s": ("ms", 1e3), "B": ("MB", 1 / (1 << 20)), "share": ("%", 100.0)}
MOST_LETTERS: Final = 40
FEW: Final = 40  # points of a line: each has a marker and an error bar
WIDE_RANGE: Final = 8  # of ranks: from here on axes are logarithmic


def shortened(text: str, most: int = MOST_LETTERS) -> str:
    """Escape what a reader cannot see, and leave out the middle of what is long: names often differ at their ends."""
    text = printable(text)
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _stacked(axes: "Axes", plot: Plot) -> dict[str, Any]:
    places, handles = places_of(plot), dict[str, Any]()
    left = dict.fromkeys(places, 0.0)
    unit, scale = SCALES.get(plot.unit, (plot.unit, 1.0))
    for number, series in enumerate(plot.series):
        values = [scale * value for value in series.y]
        y = [places[str(x)] for x in series.x]
        if series.role == "mark":
            (handles[series.label],) = axes.plot(values, y, "d", color=INK, markersize=4)
            _intervals(axes, series, y, scale, across=True)
            continue
        style: dict[str, Any] = {"color": COLORS[number % len(COLORS)], "hatch": HATCHES[number % len(HATCHES)]}
        begin = [left[str(x)] for x in series.x]
        handles[series.label] = axes.barh(y, values, left=begin, height=0.7, edgecolor=INK, linewidth=0.5, **style)
        left |= {str(x): at + value for x, at, value in zip(series.x, begin, values, strict=True)}
    _name_bars(axes, plot, places, unit)
    return handles


def _bars(axes: "Axes", plot: Plot) -> dict[str, Any]:
    places, handles, taken = places_of(plot), dict[str, Any](), dict.fromkeys(places_of(plot), 0)
    unit, scale = SCALES.get(plot.unit, (plot.unit, 1.0))
    height = 0.8 / beside(plot)
    for number, series in enumerate(plot.series):
        names = [str(x) for x in series.x]
        y = [places[name] + height * (taken[name] + 0.5) - 0.4 for name in names]
        place = 1 + number if series.role == "measured" else 4
        style: dict[str, Any] = {"color": COLORS[place % len(COLORS)], "hatch": HATCHES[place % len(HATCHES)]}
        values = [scale * value for value in series.y]
        handles[series.label] = axes.barh(y, values, height=0.9 * height, edgecolor=INK, linewidth=0.5, **style)
        _intervals(axes, series, y, scale, across=True)
        for name in names:
            taken[name] += 1
    _name_bars(axes, plot, places, unit)
    return handles


def _lines(axes: "Axes", plot: Plot) -> dict[str, Any]:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    unit, scale = SCALES.get(plot.unit, (plot.unit, 1.0))
    handles, wide = dict[str, Any](), plot.x_label == "ranks" and _range(plot) > WIDE_RANGE
    for number, series in enumerate(map(thinned, plot.series)):
        color = COLORS[LINE_COLORS[number % len(LINE_COLORS)]]
        x, y = [float(each) for each in series.x], [scale * each for each in series.y]
        style: dict[str, Any] = {"color": color, "linestyle": DASHES[number // len(LINE_COLORS) % len(DASHES)]}
        style |= {"marker": MARKERS[number % len(MARKERS)], "markersize": 5}
        style["markevery"] = 1 if len(x) <= FEW else (number * len(x) // 80 % 40, max(len(x) // 8, 1))
        if series.role == "reference":
            style = {"color": INK, "linestyle": (0, (4, 3)), "linewidth": 1.0}
        (handles[series.label.partition(",")[0] if series.role == "reference" else series.label],) = axes.plot(
            x, y, **style
        )
        if len(x) <= FEW:
            _intervals(axes, series, x, scale, across=False)
        elif series.low and series.high:
            low, high = ([scale * each for each in ends] for ends in (series.low, series.high))
            axes.fill_between(x, low, high, color=color, alpha=FAINT, linewidth=0)
    if wide:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_minor_formatter(NullFormatter())
        if plot.unit != "share":
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_number))
    if plot.unit == "share":
        axes.set_ylim(bottom=0)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(_with_unit(plot.y_label, unit))
    axes.grid(color=GRID, linewidth=0.5)
    return handles


PAINTERS: Final = {"stacked": _stacked, "bars": _bars, "lines": _lines}


def _intervals(axes: "Axes", series: Series, at: Sequence[float], scale: float, *, across: bool) -> None:
    """Draw the intervals by themselves: the interval of a median need not hold the mean that a bar shows."""
    if not series.low or not series.high:
        return
    ends = list(zip(series.low, series.high, strict=True))
    middle, half = [scale * (a + b) / 2 for a, b in ends], [scale * (b - a) / 2 for a, b in ends]
    style: dict[str, Any] = {"fmt": "none", "ecolor": INK, "elinewidth": 1.0, "capsize": 3}
    if across:
        axes.errorbar(middle, at, xerr=half, **style)
    else:
        axes.errorbar(at, middle, yerr=half, **style)


def _name_bars(axes: "Axes", plot: Plot, places: dict[str, int], unit: str) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_yticks(list(places.values()), [shortened(name) for name in places])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel(_with_unit(plot.y_label, unit))
    axes.xaxis.set_major_formatter(FuncFormatter(_number))
    axes.grid(axis="x", color=GRID, linewidth=0.5)


def places_of(plot: Plot) -> dict[str, int]:
    """Return the place of every bar's name, from the top."""
    return {name: place for place, name in enumerate(dict.fromkeys(str(x) for each in plot.series for x in each.x))}


def beside(plot: Plot) -> int:
    """Return how many bars one name has at most."""
    if plot.style == "stacked":
        return 1
    return max(Counter(x for each in plot.series for x in each.x).values(), default=1)


def _range(plot: Plot) -> float:
    every = [x for each in plot.series for x in each.x if isinstance(x, float)]
    return max(every) / min(every)


def _with_unit(label: str, unit: str) -> str:
    return shortened(f"{label} ({unit})" if unit else label, 2 * MOST_LETTERS)


def _number(value: float, _: int) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:.4g}"
