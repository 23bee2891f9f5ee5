"""`muster resume RUN`: begin the next attempt of a run that is over, from its newest good checkpoint."""

import argparse
import sys
from typing import TYPE_CHECKING

from muster.launch.common import options

if TYPE_CHECKING:
    from collections.abc import Callable

    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.submit.prepare import Prepared


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
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
    from muster.jobs.runfolder.rundir import find_run, runs_root
    from muster.launch.submit.claim import claimed

    def say(text: str) -> None:
        if not args.quiet:
            print(f"muster: {text}", file=sys.stderr)

    folder = find_run(runs_root(args.runs), args.run, unique=True)
    with claimed(folder):
        return _resume(folder, args, say)


def _resume(folder: "RunDir", args: argparse.Namespace, say: "Callable[[str], None]") -> int:
    from muster.launch.commands.run import by_hand
    from muster.launch.submit import resume
    from muster.launch.submit.start import check_torch

    given = list(args.overrides)
    prepared = resume.again(folder, args, say)
    if prepared.submission.route.transport == "hand":
        if args.detach:
            from muster.jobs.basics.errors import UsageError

            raise UsageError("--detach: by hand, node 0's line is the supervisor, and stays; leave it out")
        prepared = by_hand(prepared, args)
    check_torch(prepared.submission)
    resume.write(prepared, given)
    return _leave(prepared) if args.detach else _stay(prepared, quiet=args.quiet)


def _leave(prepared: "Prepared") -> int:
    """Leave a supervisor behind, or a job in the queue, and say so."""
    from muster.launch.submit.queueing import QUEUES, whereabouts
    from muster.launch.submit.start import detach

    submission, context = prepared.submission, prepared.context
    if prepared.is_queued:
        QUEUES[submission.route.transport](submission)
    else:
        detach(context.run, context.python, context.code)
    print(context.run.run_id)
    print(f"muster: it {whereabouts(context.run)}", file=sys.stderr)
    return 0


def _stay(prepared: "Prepared", *, quiet: bool) -> int:
    """Supervise it here, or follow it through its queue; return the exit code of its verdict."""
    from muster.launch.submit.queueing import QUEUES
    from muster.launch.submit.start import supervise
    from muster.launch.supervision.console import Console

    submission, console = prepared.submission, Console(quiet=quiet)
    if not prepared.is_queued:
        return supervise(submission, console).code
    if submission.route.transport == "submitit":
        from muster.launch.scheduler.submitit_run import run_here

        return run_here(submission, console)
    from muster.launch.scheduler.held_signals import holding_signals
    from muster.launch.scheduler.slurm_follow import follow

    with holding_signals() as asked:
        QUEUES[submission.route.transport](submission)
        return follow(prepared.context.run, console, asked)
