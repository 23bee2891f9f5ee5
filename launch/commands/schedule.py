"""`muster schedule`: a drawing of a pipeline's step with its bubble, or a comparison of all schedules."""

import argparse
import json
from typing import Final

from muster.launch.common.options import add_json, given, whole

EPILOG: Final = """\
muster schedule                                       compare all schedules with 4 ranks and 8 micro-batches
muster schedule 1f1b -p 4 -m 8                        draw one schedule
muster schedule zbv -p 4 -m 8 --costs 7,6,7 --message 0.5 --svg zbv.svg
--costs F,I,W: times of a rank for one micro-batch and all its stages: forward, gradient of inputs, gradient of weights.
These times are divided equally among the stages of a rank. In flight: the largest number of micro-batches whose
activations a rank keeps; with two stages per rank, the activations of one stage count half. The formula assumes that
F = I = W and that messages take no time.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="NAME", nargs="?", help="a schedule (default: compare all)")
    for names, letter, default, phrase in (
        (("-p", "--ranks"), "P", 4, "ranks of the pipeline (default: 4)"),
        (("-m", "--microbatches"), "M", 8, "micro-batches of a step (default: 8)"),
        (("--chunks",), "V", None, "stages per rank, only for interleaved (default: 2)"),
        (("--slices",), "S", None, "slices of every sequence, only for terapipe (default: 4)"),
    ):
        parser.add_argument(*names, metavar=letter, type=whole(names[0], least=1), default=default, help=phrase)
    parser.add_argument(
        "--costs", metavar="F,I,W", default="1,1,1", help="a rank's times for one micro-batch (default: 1,1,1)"
    )
    parser.add_argument("--message", metavar="S", default="0", help="time of a message between ranks (default: 0)")
    parser.add_argument("--svg", metavar="FILE", help="also draw the schedule into this file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Draw one schedule, or compare all.

    Raises:
        UsageError: if the schedule does not exist, or the numbers are invalid for it.
        RunFolderError: if the file cannot be written.
    """
    from muster.jobs.basics.errors import UsageError
    from muster.launch.common import screen
    from muster.launch.look import schedule_view as view
    from muster.pipe.schedules.tables import SCHEDULES

    if args.svg and args.name is None:
        raise UsageError(f"--svg {args.svg}: draws one schedule; name one of {', '.join(SCHEDULES)}")
    shown = view.all_of(given(args, view.ScheduleRequest))
    records = [view.record(*each) for each in shown]
    if args.svg:
        screen.save(args.svg, view.picture(records[0], *shown[0]))
    if args.json:
        print(json.dumps(records[0] if args.name else records))
    else:
        print(view.drawing(records[0], *shown[0]) if args.name else view.comparison(records))
    return 0
