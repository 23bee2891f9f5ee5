"""`muster timeline RUN`: a drawing of what each rank did in a step, with a pipeline's measured and simulated bubble."""

import argparse
import json
from typing import TYPE_CHECKING, Final

from muster.launch.common import options

if TYPE_CHECKING:
    from muster.launch.look.data_steps import DataStep

EPILOG: Final = """\
muster timeline RUN --step 40 --svg step.svg

A data-parallel rank has two lines: its activity, and the number of its collectives in progress. A collective lasts
from its launch to its end on that rank. The time during which the rank also computes is hidden.

If there are several pipelines, the slowest one is drawn, because the others wait for it when gradients are averaged.
All pipelines are listed below. Ranks in one column do the same work, so a rank that is busy for longer is slow.
The simulated bubble assumes that every action takes the mean time of its kind and stage.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    options.add_run(parser)
    options.add_json(parser)
    a_step, a_rank = options.whole("--step", least=1), options.whole("--rank", least=0)
    parser.add_argument("--step", metavar="N", type=a_step, help="this step (default: the newest recorded one)")
    options.add_attempt(parser, "with a recorded step")
    parser.add_argument("--rank", metavar="R", type=a_rank, help="this rank, or its pipeline (default: the slowest)")
    parser.add_argument("--svg", metavar="FILE", help="also draw the step into this file")


def run(args: argparse.Namespace) -> int:
    """Print one recorded step.

    Raises:
        UsageError: if an option is invalid.
        NotFoundError: if the step was not recorded.
        RunFolderError: if the file cannot be written.
    """
    from muster.launch.common import screen
    from muster.launch.look.data_steps import DataStep
    from muster.launch.look.plots.data_step_view import render_data
    from muster.launch.look.timeline_view import picture, render, sizes_of
    from muster.launch.look.timelines import read_timeline

    folder = options.the_run(args)
    timeline = read_timeline(folder, args.attempt, args.step)
    recorded = timeline.slowest() if args.rank is None else timeline.of_rank(args.rank)
    title, sizes = f"{folder.run_id}, attempt {timeline.attempt}, step {timeline.step}", sizes_of(timeline, recorded)
    about = {"run": folder.run_id, "attempt": timeline.attempt, "step": timeline.step, "recorded": timeline.steps}
    if isinstance(recorded, DataStep):
        if args.svg:
            _draw(args, recorded)
            screen.say(f"wrote {args.svg}")
        text = json.dumps(about | recorded.to_json()) if args.json else ""
        print(text or render_data(f"{title}: {sizes}", recorded, args.rank))
        return 0
    if args.svg:
        screen.save(args.svg, picture(title, sizes, recorded))
    if args.json:
        pipelines = [each.summary() for each in timeline.pipelines]
        print(json.dumps({**about, **recorded.to_json(), "pipelines": pipelines}))
        return 0
    print(render(f"{title}: {sizes}", timeline, recorded))
    return 0


def _draw(args: argparse.Namespace, step: "DataStep") -> None:
    """Draw a data-parallel step into a file."""
    import shlex
    from pathlib import Path

    from muster.launch.bench.choices import check_output
    from muster.launch.look.plots import draw
    from muster.launch.look.plots.lanes import timeline_plot

    check_output("--svg", args.svg, (".svg",))
    command = shlex.join(["muster", "timeline", *filter(None, [args.run]), "--svg", args.svg])
    draw.save(timeline_plot({step.mode: step}, args.rank), Path(args.svg), command)
