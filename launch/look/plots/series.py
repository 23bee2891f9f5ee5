"""The content of a plot as data, for drawings (`draw.py`), tables, JSON and the report. Pure.

All numbers come from `comparison.RunRow` and `steps.Measured`. They are in seconds, bytes, units per second, or
fractions of 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any, Final, Literal

from muster.jobs.basics.words import counted
from muster.jobs.measuring.figures import NothingToPlotError
from muster.jobs.measuring.stats import median_interval
from muster.launch.look.comparison import RunRow, scaled
from muster.launch.look.steps import PARTS, Measured, losses_of
from muster.launch.records.runrows import rate_of

KINDS: Final = ("split_time", "throughput", "scaling", "loss", "loss_time", "memory", "timeline")
LOSSES: Final = ("loss", "loss_time")  # kinds that plot every step, warm-up included
INTERVAL: Final = "with the 95 % interval or, for few repeats, their range"
Groups = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True)
class PlotSeries:
    """One line, or the bars of one color. `low` and `high` are the ends of the intervals.

    The role "reference" is for computed values (the ideal line, a formula), "mark" for points on top of stacked bars.
    """

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    role: Literal["measured", "reference", "mark"] = "measured"


@dataclass(frozen=True)
class Plot:
    """One panel of a plot, with optional further panels below."""

    kind: str
    title: str
    x_label: str
    y_label: str
    series: tuple[PlotSeries, ...]
    style: Literal["stacked", "bars", "lines", "lanes"] = "lines"
    unit: str = ""  # the unit of y: s, B or share; any other text is shown unchanged
    note: str = ""
    below: "Plot | None" = None
    lanes: tuple[str, ...] = ()  # for timelines only: the lanes, from the top

    def to_json(self) -> dict[str, Any]:
        """Return the plot for JSON."""
        return asdict(self)

    @property
    def panels(self) -> tuple["Plot", ...]:
        """This panel and the panels below it."""
        return (self, *(self.below.panels if self.below else ()))


def plot_of(
    kind: str,
    rows: Sequence[RunRow],
    groups: Groups,
    *,
    baseline: str | None = None,
    formulas: Mapping[str, float] | None = None,
) -> Plot:
    """Return a plot of `rows`, which `compared` computed from `groups`.

    `baseline` is the label of the row at which the ideal line starts. If it is None, each line has an ideal line, which
    starts at its row with the fewest ranks. `formulas` are the predicted peak memories of rows, in bytes.

    Raises:
        NothingToPlotError: if no row has the plotted quantity, or the rows cannot share a plot.
    """
    makers: dict[str, Callable[[], Plot]] = {
        "split_time": lambda: _split_time(rows),
        "throughput": lambda: _throughput(rows, groups),
        "scaling": lambda: _scaling(rows, groups, baseline),
        "loss": lambda: _loss(rows, groups),
        "loss_time": lambda: _loss_time(rows, groups),
        "memory": lambda: _memory(rows, groups, formulas or {}),
    }
    return makers[kind]()


def _split_time(rows: Sequence[RunRow]) -> Plot:
    labels = tuple(row.label for row in rows)
    parts = [PlotSeries(part, labels, tuple(row.parts_s[part] for row in rows)) for part in PARTS]
    medians, lows, highs = zip(*((row.median_s, row.low_s, row.high_s) for row in rows), strict=True)
    step = PlotSeries("median step", labels, medians, lows, highs, role="mark")
    note = f"parts: means over steps and ranks; median step: {INTERVAL}"
    return Plot("split_time", "Time of a step", "", "time", (*parts, step), "stacked", "s", note)


def _throughput(rows: Sequence[RunRow], groups: Groups) -> Plot:
    rows, note = _with(rows, lambda row: row.rate > 0.0, "no rate recorded")
    series = []
    for mode, alike in groupby(sorted(rows, key=lambda row: (_first(rows, row.mode), row.ranks)), lambda row: row.mode):
        own = tuple(alike)
        lows, highs = zip(*(_rates(groups[row.label]) for row in own), strict=True)
        labels = tuple(row.label for row in own)
        series.append(PlotSeries(mode or "run", labels, tuple(row.rate for row in own), lows, highs))
    note = _joined(f"all ranks together, {INTERVAL}", note)
    return Plot("throughput", "Throughput", "", "rate", tuple(series), "bars", _unit(rows), note)


def _scaling(rows: Sequence[RunRow], groups: Groups, baseline: str | None) -> Plot:
    rows, note = _with(rows, lambda row: row.rate > 0.0, "no rate recorded")
    base = next((row for row in rows if row.label == baseline), None)
    rates, ideals, efficiencies = [], [], []
    for name, line in _lines(rows).items():
        ranks = tuple(float(row.ranks) for row in line)
        lows, highs = zip(*(_rates(groups[row.label]) for row in line), strict=True)
        start = base or line[0]
        rates.append(PlotSeries(name, ranks, tuple(row.rate for row in line), lows, highs))
        ideal = tuple(start.rate * row.ranks / start.ranks for row in line)
        ideals.append(PlotSeries(f"ideal, from {start.label}", ranks, ideal, role="reference"))
        efficiencies.append(PlotSeries(name, ranks, tuple(scaled(row, start)[1] or 0.0 for row in line)))
    if max(len(each.x) for each in rates) < 2:
        raise NothingToPlotError("scaling needs rows of one mode with different numbers of ranks; name such runs")
    every = tuple(sorted({rank for each in rates for rank in each.x if isinstance(rank, float)}))
    whole = PlotSeries("ideal", every, tuple(1.0 for _ in every), role="reference")
    below = Plot("scaling", "Efficiency", "ranks", "share of the ideal rate", (*efficiencies, whole), unit="share")
    note = _joined(INTERVAL, note)
    return Plot("scaling", "Scaling", "ranks", "rate", (*rates, *ideals), "lines", _unit(rows), note, below)


def _loss(rows: Sequence[RunRow], groups: Groups) -> Plot:
    series = []
    rows, note = _with(rows, lambda row: any(True for _ in losses_of(groups[row.label][0])), "no loss recorded")
    for row in rows:
        runs = [dict(losses_of(run)) for run in groups[row.label]]
        steps = tuple(runs[0])
        lows, highs = None, None
        if len(runs) > 1:
            found = [[losses[step] for losses in runs if step in losses] for step in steps]
            lows, highs = tuple(map(min, found)), tuple(map(max, found))
        series.append(PlotSeries(row.label, tuple(map(float, steps)), tuple(runs[0].values()), lows, highs))
    if any(each.low for each in series):
        note = _joined("lines: the first run; bands: all repeats", note)
    return Plot("loss", "Loss", "step", "loss of the batch", tuple(series), note=note)


def _loss_time(rows: Sequence[RunRow], groups: Groups) -> Plot:
    """Return the losses against the time since the first plotted step, for the first run of each row."""
    series = []
    rows, note = _with(rows, lambda row: any(True for _ in losses_of(groups[row.label][0])), "no loss recorded")
    for row in rows:
        steps = [step for step in groups[row.label][0].steps if step.loss is not None]
        began = steps[0].time - steps[0].seconds
        losses = tuple(step.loss for step in steps if step.loss is not None)
        series.append(PlotSeries(row.label, tuple(step.time - began for step in steps), losses))
    if any(len(groups[row.label]) > 1 for row in rows):
        note = _joined("the first run of each row", note)
    return Plot("loss_time", "Loss over time", "seconds since the start", "loss of the batch", tuple(series), note=note)


def _memory(rows: Sequence[RunRow], groups: Groups, formulas: Mapping[str, float]) -> Plot:
    rows, note = _with(rows, lambda row: row.peak_bytes is not None, "no memory recorded")
    of_rows = [[run.peak_bytes for run in groups[row.label] if run.peak_bytes is not None] for row in rows]
    lows, highs = zip(*map(median_interval, of_rows), strict=True)
    series = [PlotSeries("measured", tuple(row.label for row in rows), tuple(map(max, of_rows)), lows, highs)]
    if known := tuple(row.label for row in rows if row.label in formulas):
        series.append(PlotSeries("formula", known, tuple(formulas[label] for label in known), role="reference"))
    note = _joined("the fullest rank", note)
    return Plot("memory", "Peak memory", "", "memory", tuple(series), "bars", "B", note)


def _with(rows: Sequence[RunRow], has: Callable[[RunRow], bool], without: str) -> tuple[list[RunRow], str]:
    """Return the rows that satisfy `has`, and a note about the others."""
    kept = [row for row in rows if has(row)]
    missing = [row.label for row in rows if not has(row)]
    if not kept:
        raise NothingToPlotError(f"{without} in {', '.join(missing)}")
    return kept, f"left out: {', '.join(missing)} ({without})" if missing else ""


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _unit(rows: Sequence[RunRow]) -> str:
    units = sorted({row.unit for row in rows})
    if len(units) > 1:
        raise NothingToPlotError(f"the rows have different units: {', '.join(units)}; plot them separately")
    return units[0]


def _rates(runs: Sequence[Measured]) -> tuple[float, float]:
    """Return the interval of the rate over the runs, or over the steps of a single run."""
    units = [run.steps for run in runs] if len(runs) > 1 else [(step,) for step in runs[0].steps]
    return median_interval([rate_of((step.units, step.seconds) for step in each) for each in units])


def _first(rows: Sequence[RunRow], mode: str) -> int:
    """Return the index of the first row of a mode."""
    return next(place for place, row in enumerate(rows) if row.mode == mode)


def _lines(rows: Sequence[RunRow]) -> dict[str, list[RunRow]]:
    """Group rows into lines so that each line has every number of ranks at most once.

    Each mode is a line. If that puts two rows with the same number of ranks on one line, each combination of mode and
    global batch size is a line, or else each combination of mode and batch size per rank.

    Raises:
        NothingToPlotError: if no grouping works.
    """
    ways: list[Callable[[RunRow], str]] = [
        lambda row: row.mode or "run",
        lambda row: f"{row.mode}, batch {row.batch}",
        lambda row: f"{row.mode}, batch {(row.batch or 0) / row.ranks:g} per rank",
    ]
    found: dict[str, list[RunRow]] = {}
    for way in ways:
        found = {}
        for row in sorted(rows, key=lambda row: (_first(rows, row.mode), row.ranks)):
            found.setdefault(way(row), []).append(row)
        if all(len({row.ranks for row in line}) == len(line) for line in found.values()):
            return found
    line = next(line for line in found.values() if len({row.ranks for row in line}) < len(line))
    one, other = next((a, b) for a, b in pairwise(line) if a.ranks == b.ranks)
    same = f"are both {one.mode} on {counted(one.ranks, 'rank')}"
    raise NothingToPlotError(f"{one.label} and {other.label} {same}; leave one out, or give both the same label")
