"""`muster timeline RUN`: draw what every rank of a pipeline did in a step, its bubble beside the simulated one."""

import argparse
import json
from typing import TYPE_CHECKING, Final

from muster.launch.common import options

if TYPE_CHECKING:
    from muster.launch.look.timelines import Recorded, Timeline

WIDE: Final = 120  # columns, where the output is no terminal
STAGES: Final = ("stage>", "rank>", "forward>", "backward>", "of weights>", "message on>", "to send>", "to take>")
PIPELINES: Final = ("pipeline of ranks", "step>", "bubble>", "busy, by rank")
APART: Final = 0.01  # of bubbles: beyond it, why they differ is said
EPILOG: Final = """\
Ranks are those of the run. Of several pipelines the slowest is drawn, for which the others wait when gradients are
averaged, and all are listed: ranks of one column do the same work, so one that is busy for longer is a slow one.
The simulated bubble is that of ranks that do nothing else, where every action takes the mean of its kind and stage.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_run(parser)
    options.add_json(parser)
    a_step, a_rank = options.whole("--step", least=1), options.whole("--rank", least=0)
    parser.add_argument("--step", metavar="N", type=a_step, help="this step (default: the newest that was recorded)")
    options.add_attempt(parser, "that has it")
    parser.add_argument("--rank", metavar="R", type=a_rank, help="the pipeline of this rank (default: the slowest)")
    parser.add_argument("--svg", metavar="FILE", help="draw it into a file, too")


def run(args: argparse.Namespace) -> int:
    """Print one recorded step.

    Raises:
        UsageError: a number that cannot be.
        RunFolderError: nothing was recorded, or the file cannot be written.
    """
    from muster.launch.common import screen
    from muster.launch.look.timelines import read_timeline

    folder = options.the_run(args)
    timeline = read_timeline(folder, args.attempt, args.step)
    recorded = timeline.slowest() if args.rank is None else timeline.of_rank(args.rank)
    title, sizes = f"{folder.run_id}, attempt {timeline.attempt}, step {timeline.step}", sizes_of(timeline, recorded)
    if args.svg:
        screen.save(args.svg, picture(title, sizes, recorded))
    if args.json:
        pipelines = [each.summary() for each in timeline.pipelines]
        about = {"run": folder.run_id, "attempt": timeline.attempt, "step": timeline.step, "recorded": timeline.steps}
        print(json.dumps({**about, **recorded.to_json(), "pipelines": pipelines}))
        return 0
    print(render(f"{title}: {sizes}", timeline, recorded))
    return 0


def sizes_of(timeline: "Timeline", recorded: "Recorded") -> str:
    """Say what is drawn."""
    table, count = recorded.schedule, len(timeline.pipelines)
    which = f"; {'the slowest' if recorded is timeline.slowest() else 'one'} of {count} pipelines" if count > 1 else ""
    return f"{table.name}, {table.ranks} ranks, {table.microbatches} micro-batches{which}"


def render(title: str, timeline: "Timeline", recorded: "Recorded") -> str:
    """Draw a step for the terminal, with its numbers and what actions took."""
    from muster.launch.common import screen
    from muster.launch.look import drawings
    from muster.pipe.schedules.measured import bars

    rows = bars(recorded.records, recorded.schedule.rank_of)
    simulated_s = recorded.compared.simulation.makespan_s
    parts = [
        title,
        drawings.on_screen(rows, wide=WIDE, names=names_of(recorded)),
        screen.table(STAGES, stages_of(recorded)),
        f"step    {milliseconds(recorded.seconds)}, {milliseconds(simulated_s)} simulated with these times\n"
        f"bubble  {bubbles(recorded)}{why_apart(recorded)}",
    ]
    if len(timeline.pipelines) > 1:
        parts.append(screen.table(PIPELINES, map(line_of, timeline.pipelines)))
    return "\n\n".join(parts)


def names_of(recorded: "Recorded") -> list[str]:
    """Name the rows of a drawing."""
    return [f"rank {rank}" for rank in recorded.ranks]


def stages_of(recorded: "Recorded") -> list[tuple[object, ...]]:
    """Return a line for every stage: its rank, what its actions and messages took."""
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


def line_of(recorded: "Recorded") -> tuple[str, ...]:
    """Return a pipeline's line beside the others'."""
    busy = ", ".join(map(milliseconds, recorded.busy_s()))
    share = f"{100 * recorded.compared.measured:.1f} %"
    return " ".join(map(str, recorded.ranks)), milliseconds(recorded.seconds), share, busy


def picture(title: str, sizes: str, recorded: "Recorded") -> str:
    """Draw a step as SVG."""
    from muster.pipe.schedules.measured import bars
    from muster.pipe.schedules.svg import svg

    rows = bars(recorded.records, recorded.schedule.rank_of)
    subtitle = f"{sizes}; {milliseconds(recorded.seconds)}, bubble {bubbles(recorded)}"
    return svg(rows, title=title, subtitle=subtitle, unit="ms", names=names_of(recorded))


def bubbles(recorded: "Recorded") -> str:
    """Say the measured, the simulated and the formula's share of time in which ranks idle."""
    compared = recorded.compared
    shares = (
        (compared.measured, "measured"),
        (compared.simulated, "simulated"),
        (recorded.bubble_formula(), "by the formula of equal stages"),
    )
    return ", ".join(f"{100 * share:.1f} % {what}" for share, what in shares)


def why_apart(recorded: "Recorded") -> str:
    """Say why the measured bubble is not the simulated one, where it is not."""
    from muster.pipe.schedules.measured import spread

    compared = recorded.compared
    if abs(compared.measured - compared.simulated) <= APART:
        return ""
    least, most = spread(recorded.records)
    return (
        "\n        they differ: a simulated action takes the mean of its kind and stage, real ones took "
        f"{least:.2g} to {most:.2g} of it,\n"
        "        which other work on the machine does, or fewer cores than ranks compute with"
    )


def milliseconds(seconds: float) -> str:
    """Write a time with three digits at least."""
    ms = round(1e3 * seconds, 4)
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"
