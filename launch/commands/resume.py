"""`muster resume RUN`: begin the next attempt of a run that is over, from its newest good checkpoint."""

import argparse
import sys

from muster.launch.common import options


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "muster resume RUN\n"
        "muster resume RUN -e node7 --nodes 3            without a node\n"
        "muster resume RUN --from 400                    from an older checkpoint"
    )
    options.add_run(parser)
    parser.add_argument(
        "--from",
        metavar="STEP|NAME",
        dest="origin",
        help="go on from the checkpoint of this step, or of this name (muster checkpoint list; default: newest good)",
    )
    parser.add_argument("--detach", action="store_true", help="leave once it has begun, as muster submit does")
    parser.add_argument("--quiet", action="store_true", help="say nothing unless it fails; logs are kept all the same")
    changes = parser.add_argument_group("what is to be different", "all else is as it was submitted")
    options.add_changes(changes)
    changes.add_argument("--site", metavar="FILE", help="another site file (default: the one it was started with)")
    options.add_transport(parser)


def run(args: argparse.Namespace) -> int:
    """Check that it can go on, then start as `muster run` does; the exit code is the verdict's."""
    from muster.launch.submit import resume
    from muster.launch.submit.claim import claimed
    from muster.launch.submit.request import Request
    from muster.launch.submit.start import begin
    from muster.launch.supervision.console import Console

    def say(text: str) -> None:
        if not args.quiet:
            print(f"muster: {text}", file=sys.stderr)

    folder, request = options.the_run(args, unique=True), options.given(args, Request)
    with claimed(folder):
        prepared = resume.again(folder, request, args.origin, say)
        return begin(
            prepared,
            Console(quiet=args.quiet),
            detach=args.detach,
            write=lambda ready: resume.write(ready, request.overrides),
        )
