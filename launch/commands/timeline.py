"""`muster timeline RUN`: draw what every rank did in a step, and a pipeline's bubble beside the simulated one."""

import argparse
import json
from typing import TYPE_CHECKING, Final

from muster.launch.common import options

if TYPE_CHECKING:
    from muster.launch.look.data_steps import DataStep

EPILOG: Final = """\
muster timeline RUN --step 40 --svg step.svg

Data-parallel ranks have two lines each: what the rank did, and how many of its collectives were under way. A
collective lasts from its launch to its end on that rank; what of it passes while the rank computes is hidden.

Ranks are those of the run. Of several pipelines the slowest is drawn, for which the others wait when gradients are
averaged, and all are listed: ranks of one column do the same work, so one that is busy for longer is a slow one.
The simulated bubble is that of ranks that do nothing else, where every action takes the mean of its kind and stage.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    options.add_run(parser)
    options.add_json(parser)
    a_step, a_rank = options.whole("--step", least=1), options.whole("--rank", least=0)
    parser.add_argument("--step", metavar="N", type=a_step, help="this step (default: the newest that was recorded)")
    options.add_attempt(parser, "that has it")
    parser.add_argument("--rank", metavar="R", type=a_rank, help="this rank, or its pipeline (default: the slowest)")
    parser.add_argument("--svg", metavar="FILE", help="draw it into a file, too")


def run(args: argparse.Namespace) -> int:
    """Print one recorded step.

    Raises:
        UsageError: a number that cannot be.
        RunFolderError: nothing was recorded, or the file cannot be written.
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
