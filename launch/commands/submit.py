"""`muster submit JOB.yaml`: the start of a run in the background. It prints the run's id and returns."""

import argparse
import shlex
from typing import TYPE_CHECKING

from muster.launch.common.options import add_request, given

if TYPE_CHECKING:
    from muster.launch.plan.submission import Submission


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "muster submit job.yaml --on slurm --dry-run     show the batch script"
    add_request(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, without submitting it")
    parser.add_argument("--parsable", action="store_true", help="print only the run's id")
    parser.add_argument(
        "--no-snapshot",
        action="store_true",
        help="use the code as it is when the job starts, instead of a copy made now",
    )


def run(args: argparse.Namespace) -> int:
    """Prepare the run, start or queue it, and print its id."""
    from muster.launch.submit import start
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request

    prepared = prepare(given(args, Request))
    if args.dry_run:
        print(text_of(prepared.submission))
        return 0
    start.check_can_be_left(prepared.route)
    start.check_torch(prepared.submission)
    start.leave(start.write_run(prepared, snapshot=not args.no_snapshot))
    run = prepared.context.run
    ways = f"{run.command('logs -f')} follows it, {run.command('stop')} ends it"
    print(run.run_id if args.parsable else f"{run.run_id} {start.whereabouts(run)}; {ways}")
    return 0


def text_of(submission: "Submission") -> str:
    """Return the text of the submission: a batch script, or the commands that start the agents."""
    from muster.launch.scheduler import queueing, submitit_run
    from muster.launch.submit.routes import commands_of

    if submission.route.transport == "submitit":
        return submitit_run.script(submission).removesuffix("\n")
    if submission.route.is_queued:
        return queueing.script(submission).removesuffix("\n")
    return "\n".join(map(shlex.join, commands_of(submission)))
