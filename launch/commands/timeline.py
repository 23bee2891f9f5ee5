"""`muster timeline RUN`: draw what every rank of a pipeline did in a step, its bubble beside the simulated one."""

import argparse
import json
from typing import Final

from muster.launch.common import options

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
    from muster.launch.look.timeline_view import picture, render, sizes_of
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
