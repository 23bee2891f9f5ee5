"""Timelines as plots: for each rank a lane of computation and one of communication, all on one time axis."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.measuring.figures import NothingToPlotError
from muster.launch.look.data_steps import PHASES, WAIT, DataStep
from muster.launch.look.plots.series import Plot, Series
from muster.launch.look.timelines import Recorded
from muster.pipe.schedules.draw import COMPUTE, PHRASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS: Final = 16  # of one run
LANES: Final = ("computation", "communication")
NAMES: Final = {WAIT: "exposed wait", "replay": "replayed CUDA graph", "send": "send", "wait": "wait for a message"}
ORDER: Final = tuple(NAMES.get(each, each) for each in (*PHASES, *PHRASES.values()))  # of a legend; collectives follow
Step = Recorded | DataStep
Bar = tuple[int, str, str, float, float]  # rank, lane, kind, start and end


def timeline_plot(steps: Mapping[str, Step], rank: int | None = None) -> Plot:
    """Return one step of each run, by its label, above each other; of many ranks the first ones, or a certain one.

    A series is a kind of bar: `x` are the lanes, `low` to `high` the times, `y` how long each lasted.

    Raises:
        NothingToPlotError: no step has the rank.
    """
    bars: dict[str, list[tuple[str, float, float]]] = {}
    notes = []
    for label, step in steps.items():
        ranks = [each for each in step.ranks if rank in (None, each)]
        if not ranks:
            raise NothingToPlotError(f"{label} has no rank {rank}")
        if len(ranks) > MOST_RANKS:
            notes.append(f"{label}: the first {MOST_RANKS} of {len(ranks)} ranks")
        if isinstance(step, DataStep) and step.not_timed:
            notes.append(f"{label}: collectives are missing, {step.not_timed}")
        lanes = {each: {lane: f"{label}, rank {each}: {lane}" for lane in LANES} for each in ranks[:MOST_RANKS]}
        for number, lane, kind, start_s, end_s in _bars(step):
            if number in lanes:
                bars.setdefault(NAMES.get(kind, kind), []).append((lanes[number][lane], start_s, end_s))
    series = [_series(kind, found) for kind, found in sorted(bars.items(), key=_place)]
    note = "; ".join(notes)
    return Plot("timeline", "Timeline of a step", "time", "time in the step", tuple(series), "lanes", "s", note)


def _bars(step: Step) -> Iterable[Bar]:
    if isinstance(step, DataStep):
        return ((each.rank, LANES[each.communicates], each.kind, each.start_s, each.end_s) for each in step.spans)
    return (
        (
            step.ranks[each.rank],
            LANES[each.kind not in COMPUTE],
            PHRASES.get(each.kind, each.kind),
            each.start_s,
            each.end_s,
        )
        for each in step.records
    )


def _place(found: tuple[str, Any]) -> tuple[int, str]:
    kind, _ = found
    return (ORDER.index(kind) if kind in ORDER else len(ORDER)), kind


def _series(kind: str, found: Sequence[tuple[str, float, float]]) -> Series:
    lanes, starts, ends = zip(*found, strict=True)
    return Series(kind, lanes, tuple(end - start for start, end in zip(starts, ends, strict=True)), starts, ends)
