"""Timelines as plots: each rank has a lane for computation and a lane for communication, on one time axis."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from muster.jobs.measuring.figures import NothingToPlotError
from muster.launch.look.data_steps import OTHER, WAIT, DataStep
from muster.launch.look.plots.panels import COLORS, GRID, INK, SCALES, shortened
from muster.launch.look.plots.series import Plot, PlotSeries
from muster.launch.look.timelines import Recorded
from muster.pipe.schedules.draw import COMPUTE, PHRASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS: Final = 16  # maximum number of ranks drawn per run
LANES: Final = ("computation", "communication")
NAMES: Final = {WAIT: "exposed wait", "replay": "replayed CUDA graph"}
MOST_TRACKS: Final = 8
Step = Recorded | DataStep
Bar = tuple[int, str, str, float, float]  # rank, lane, kind, start and end


class Look(NamedTuple):
    """The appearance of a kind of bar; `color` is an index into COLORS."""

    letter: str
    color: int
    hatch: str


LOOKS: Final = {
    "data": Look("d", 7, ""),
    "forward": Look("F", 0, ".."),
    "backward": Look("B", 1, ""),
    "gradient of inputs": Look("I", 3, "\\\\\\"),
    "gradient of weights": Look("W", 6, "xx"),
    "exposed wait": Look("~", 4, ""),
    "optimizer": Look("O", 2, "///"),
    "replayed CUDA graph": Look("R", 3, ""),
}
MESSAGES: Final = [Look("", 5, ""), Look("", 5, "xx"), Look("", 6, ""), Look("", 6, "oo"), Look("", 3, "++")]


def timeline_plot(steps: Mapping[str, Step], rank: int | None = None) -> Plot:
    """Return a plot of one step of each run, stacked vertically; `steps` maps labels to steps.

    The plot shows only `rank` if it is given, else the first ranks of each run. A series is a kind of bar: `x` are its
    lanes, `low` and `high` its start and end times, and `y` its durations.

    Raises:
        NothingToPlotError: if a step has no record of `rank`.
    """
    bars: dict[str, list[tuple[str, float, float]]] = {}
    lanes, notes = list[str](), list[str]()
    for label, step in steps.items():
        ranks = [each for each in step.ranks if rank in (None, each)]
        if not ranks:
            raise NothingToPlotError(f"{label} has no rank {rank}")
        if len(ranks) > MOST_RANKS:
            notes.append(f"{label}: the first {MOST_RANKS} of {len(ranks)} ranks are drawn".removeprefix(": "))
        if isinstance(step, DataStep) and step.not_timed:
            notes.append(f"{label}: collectives are missing: {step.not_timed}".removeprefix(": "))
        prefix = f"{label}, " if label else ""
        drawn = {each: {lane: f"{prefix}rank {each}: {lane}" for lane in LANES} for each in ranks[:MOST_RANKS]}
        lanes += [name for names in drawn.values() for name in names.values()]
        for number, lane, kind, start_s, end_s in _bars(step):
            if number in drawn:
                bars.setdefault(NAMES.get(kind, kind), []).append((drawn[number][lane], start_s, end_s))
    series = tuple(_series(kind, found) for kind, found in sorted(bars.items(), key=_place))
    title, note = "Timeline of a step", "; ".join(notes)
    return Plot("timeline", title, "time since the step began", "time", series, "lanes", "s", note, lanes=tuple(lanes))


def _bars(step: Step) -> Iterable[Bar]:
    spans = step.spans if isinstance(step, DataStep) else step.collectives
    for span in spans:
        yield span.rank, LANES[span.communicates], span.kind, span.start_s, span.end_s
    if isinstance(step, DataStep):
        return
    known = PHRASES | {"send": "send", "wait": "wait for a message"}
    for each in step.records:
        lane = LANES[each.kind not in COMPUTE]
        yield step.ranks[each.rank], lane, known.get(each.kind, OTHER), each.start_s, each.end_s


def _place(found: tuple[str, Any]) -> tuple[int, str]:
    kind, _ = found
    return [*LOOKS, kind].index(kind), kind


def _series(kind: str, found: Sequence[tuple[str, float, float]]) -> PlotSeries:
    lanes, starts, ends = zip(*found, strict=True)
    return PlotSeries(kind, lanes, tuple(end - start for start, end in zip(starts, ends, strict=True)), starts, ends)


def paint_lanes(axes: "Axes", plot: Plot) -> dict[str, Any]:
    """Draw the bars. Overlapping bars of a lane share its height, so that all of them are visible."""
    from matplotlib.ticker import FuncFormatter

    unit, scale = SCALES[plot.unit]
    places = {lane: place for place, lane in enumerate(plot.lanes)}
    by_lane: dict[str, list[tuple[float, float, int]]] = {lane: [] for lane in plot.lanes}
    for number, series in enumerate(plot.series):
        for lane, start_s, end_s in zip(series.x, series.low or (), series.high or (), strict=True):
            by_lane[str(lane)].append((start_s, end_s, number))
    handles = dict[str, Any]()
    boxes: dict[tuple[int, float, float], list[tuple[float, float]]] = {}
    for lane, bars in by_lane.items():
        tracks = _tracks(bars)
        height = 0.84 / (1 + max(tracks, default=0))
        for (start_s, end_s, number), track in zip(sorted(bars), tracks, strict=True):
            low = places[lane] - 0.42 + track * height
            boxes.setdefault((number, low, height), []).append((scale * start_s, scale * (end_s - start_s)))
    messages = [each.label for each in plot.series if each.label not in LOOKS]
    looks = LOOKS | dict(zip(messages, cycle(MESSAGES), strict=False))
    for (number, low, height), pieces in sorted(boxes.items()):
        look = looks[plot.series[number].label]
        style: dict[str, Any] = {"facecolor": COLORS[look.color], "hatch": look.hatch}
        handles[plot.series[number].label] = axes.broken_barh(
            pieces, (low, height), edgecolor=INK, linewidth=0.3, **style
        )
    axes.set_yticks(list(places.values()), [shortened(lane) for lane in places])
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{plot.x_label} ({unit})")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.grid(axis="x", color=GRID, linewidth=0.5)
    return handles


def _tracks(bars: Sequence[tuple[float, float, int]]) -> list[int]:
    """Assign bars, sorted by start, to the fewest tracks without overlap, but at most `MOST_TRACKS`."""
    ends: list[float] = []
    tracks = []
    for start_s, end_s, _ in sorted(bars):
        track = next((place for place, end in enumerate(ends) if end <= start_s), len(ends))
        if track < MOST_TRACKS:
            ends[track : track + 1] = [end_s]
        tracks.append(min(track, MOST_TRACKS - 1))
    return tracks
