"""`muster schedule`: draw a pipeline's step, tell its bubble beside the formula's, or compare all schedules."""

import argparse
import json
from typing import Final

from muster.launch.common.options import add_json, given, whole

EPILOG: Final = """\
muster schedule                                       all schedules beside each other, 4 ranks and 8 micro-batches
muster schedule 1f1b -p 4 -m 8                        one of them, drawn
muster schedule zbv -p 4 -m 8 --costs 7,6,7 --message 0.5 --svg zbv.svg
Costs are times of a rank's whole part of the model for one micro-batch: forward, gradient of its inputs, gradient of
its weights; a stage of a rank that has several takes its share of them. In flight are the micro-batches whose
activations a rank keeps at most; an activation of one of two stages counts half. The formula knows no costs.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="NAME", nargs="?", help="a schedule (default: compare all)")
    for names, letter, default, phrase in (
        (("-p", "--ranks"), "P", 4, "ranks of the pipeline (default: 4)"),
        (("-m", "--microbatches"), "M", 8, "micro-batches of a step (default: 8)"),
        (("--chunks",), "V", None, "stages a rank has, of interleaved (default: 2)"),
    ):
        parser.add_argument(*names, metavar=letter, type=whole(names[0], least=1), default=default, help=phrase)
    parser.add_argument("--costs", metavar="F,I,W", default="1,1,1", help="times of a rank (default: 1,1,1)")
    parser.add_argument("--message", metavar="S", default="0", help="time of a message between ranks (default: 0)")
    parser.add_argument("--svg", metavar="FILE", help="draw it into a file, too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Draw one schedule, or compare all.

    Raises:
        UsageError: no such schedule, or numbers that make none.
        RunFolderError: the file cannot be written.
    """
    from muster.jobs.basics.errors import UsageError
    from muster.launch.common import screen
    from muster.launch.look import schedule_view as view
    from muster.pipe.schedules.tables import SCHEDULES

    if args.svg and args.name is None:
        raise UsageError(f"--svg {args.svg}: draws one schedule; name one of {', '.join(SCHEDULES)}")
    shown = view.all_of(given(args, view.Asked))
    records = [view.record(*each) for each in shown]
    if args.svg:
        screen.save(args.svg, view.picture(records[0], *shown[0]))
    if args.json:
        print(json.dumps(records[0] if args.name else records))
    else:
        print(view.drawing(records[0], *shown[0]) if args.name else view.comparison(records))
    return 0
