"""The text output of `muster timeline` for data-parallel ranks: a drawing, and a row of numbers per rank."""

from typing import Final

from muster.launch.common import screen
from muster.launch.look.data_steps import WAIT, DataStep, RankTimes
from muster.launch.look.plots.lane_text import drawing
from muster.launch.look.plots.lanes import timeline_plot
from muster.launch.look.timeline_view import COLLECTIVES, collectives_of, milliseconds

PHASES: Final = ("data", "forward", "backward", WAIT, "optimizer")
HEADS: Final = ("rank>", "data>", "forward>", "backward>", "wait>", "optimizer>")


def render_data(title: str, step: DataStep, rank: int | None) -> str:
    """Format a step for the terminal: a drawing, and the times of each rank (or of `rank` only)."""
    plot = timeline_plot({"": step}, rank)
    lines = [line_of(each) for each in step.by_rank() if rank in (None, each.rank)]
    clocks = f"clocks agree within {milliseconds(step.apart_s)}" if len(step.ranks) > 1 else "one clock"
    parts = [title, drawing(plot), screen.table((*HEADS, *COLLECTIVES), lines)]
    parts.append(f"step  {milliseconds(step.seconds)}, timed by the {step.timed_by}; {clocks}")
    left_out = f"{step.left_out} records could not be read" if step.left_out else ""
    return "\n\n".join(filter(None, [*parts, plot.note, left_out]))


def line_of(times: RankTimes) -> tuple[object, ...]:
    """Return a rank's row of the table."""
    phases = (milliseconds(times.phases_s[each]) for each in PHASES)
    return (times.rank, *phases, *collectives_of(times))
