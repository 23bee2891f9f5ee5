"""The output of `muster timeline` for pipelines, as text and as SVG: the activity of each rank in a step."""

from typing import Final

from muster.jobs.basics.words import counted
from muster.launch.common import screen
from muster.launch.look.data_steps import DataStep, RankTimes
from muster.launch.look.drawings import on_screen
from muster.launch.look.timelines import Recorded, Timeline
from muster.pipe.schedules.measured import bars, spread
from muster.pipe.schedules.svg import svg

WIDE: Final = 120  # number of columns used if the output is not a terminal
STAGES: Final = ("stage>", "rank>", "forward>", "backward>", "of weights>", "message on>", "to send>", "to take>")
PIPELINES: Final = ("pipeline of ranks", "step>", "bubble>", "busy, by rank")
COLLECTIVES: Final = ("collectives>", "MB>", "under way>", "hidden>")
APART: Final = 0.01  # difference of bubbles above which an explanation is printed


def sizes_of(timeline: Timeline, recorded: Recorded | DataStep) -> str:
    """Describe the drawn step: schedule or mode, ranks, and micro-batches."""
    if isinstance(recorded, DataStep):
        return f"{recorded.mode}, {counted(len(recorded.ranks), 'rank')}"
    table, count = recorded.schedule, len(timeline.pipelines)
    which = f"; {'the slowest' if recorded is timeline.slowest() else 'one'} of {count} pipelines" if count > 1 else ""
    return f"{table.name}, {table.ranks} ranks, {table.microbatches} micro-batches{which}"


def render(title: str, timeline: Timeline, recorded: Recorded) -> str:
    """Draw a step for the terminal, with the times of its actions and its bubble."""
    rows = bars(recorded.records, recorded.schedule.rank_of)
    simulated_s = recorded.compared.simulation.makespan_s
    parts = [
        title,
        on_screen(rows, wide=WIDE, names=names_of(recorded)),
        screen.table(STAGES, stages_of(recorded)),
        f"step    {milliseconds(recorded.seconds)}, {milliseconds(simulated_s)} simulated with these times\n"
        f"bubble  {bubbles(recorded)}{why_apart(recorded)}",
    ]
    if averaging := recorded.averaging():
        lines = ((each.rank, *collectives_of(each)) for each in averaging)
        parts.append(screen.table(("averaged over pipelines, rank>", *COLLECTIVES), lines))
    pipelines = [each for each in timeline.pipelines if isinstance(each, Recorded)]
    if len(pipelines) > 1:
        parts.append(screen.table(PIPELINES, map(line_of, pipelines)))
    return "\n\n".join(parts)


def names_of(recorded: Recorded) -> list[str]:
    """Return the names of the drawing's rows."""
    return [f"rank {rank}" for rank in recorded.ranks]


def stages_of(recorded: Recorded) -> list[tuple[object, ...]]:
    """Return a table row for each stage: its rank, and the times of its actions and messages."""
    table, costs = recorded.schedule, recorded.compared.costs

    def of(times: float | tuple[float, ...], stage: int) -> str:
        return milliseconds(times[stage] if isinstance(times, tuple) else times)

    return [
        (
            stage,
            recorded.ranks[place],
            of(costs.forward, stage),
            of(costs.input_gradient, stage),
            of(costs.weight_gradient, stage) if table.splits_backward else None,
            of(costs.message, stage) if stage + 1 < table.stages else None,
            of(costs.send, stage),
            of(costs.take, stage),
        )
        for stage, place in enumerate(table.rank_of)
    ]


def line_of(recorded: Recorded) -> tuple[str, ...]:
    """Return the table row of one of several pipelines."""
    busy = ", ".join(map(milliseconds, recorded.busy_s()))
    share = f"{100 * recorded.compared.measured:.1f} %"
    return " ".join(map(str, recorded.ranks)), milliseconds(recorded.seconds), share, busy


def collectives_of(times: RankTimes) -> tuple[object, ...]:
    """Return the cells of a rank's collectives."""
    hidden = f"{100 * times.hidden_s / times.under_way_s:.0f} %" if times.under_way_s else None
    under_way = milliseconds(times.under_way_s) if times.collectives else None
    return (times.collectives, f"{times.bytes / (1 << 20):.4g}", under_way, hidden)


def picture(title: str, sizes: str, recorded: Recorded) -> str:
    """Draw a step as SVG."""
    rows = bars(recorded.records, recorded.schedule.rank_of)
    subtitle = f"{sizes}; {milliseconds(recorded.seconds)}, bubble {bubbles(recorded)}"
    return svg(rows, title=title, subtitle=subtitle, unit="ms", names=names_of(recorded))


def bubbles(recorded: Recorded) -> str:
    """Format the share of time in which ranks idle: measured, simulated, and by the formula."""
    compared = recorded.compared
    shares = (
        (compared.measured, "measured"),
        (compared.simulated, "simulated"),
        (recorded.bubble_formula(), "by the formula for equal stages"),
    )
    return ", ".join(f"{100 * share:.1f} % {what}" for share, what in shares)


def why_apart(recorded: Recorded) -> str:
    """Explain the difference between the measured and the simulated bubble; return "" if there is none."""
    compared = recorded.compared
    if abs(compared.measured - compared.simulated) <= APART:
        return ""
    least, most = spread(recorded.records)
    return (
        "\n        they differ: the simulation uses the mean time of each kind and stage, but actions took "
        f"{least:.2g} to {most:.2g} times as long,\n"
        "        because of other work on the machine, or too few cores for the ranks"
    )


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds with at least three digits."""
    ms = round(1e3 * seconds, 4)
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
