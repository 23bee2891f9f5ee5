"""`muster submit JOB.yaml`: start a run and leave. It prints the run's id; status, logs, why and stop do the rest."""

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.launch.options import add_job, add_runs, add_transport

if TYPE_CHECKING:
    from muster.launch.console import Console
    from muster.launch.submit.prepare import Prepared
    from muster.launch.submit.submission import Submission


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser)
    add_runs(parser)
    add_transport(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and do nothing")
    parser.add_argument("--parsable", action="store_true", help="print the run's id and nothing else")
    parser.add_argument(
        "--no-snapshot", action="store_true", help="use the code as it will be then, not a copy of what it is now"
    )


def run(args: argparse.Namespace) -> int:
    """Prepare, then hand over."""
    from muster.launch.submit.prepare import prepare

    prepared = prepare(args)
    if args.dry_run:
        return show(prepared)
    run_id = leave(prepared, snapshot=not args.no_snapshot)
    what = "is in the queue" if prepared.is_queued else "has begun"
    print(run_id if args.parsable else f"{run_id} {what}; muster logs -f {run_id} follows it, muster stop ends it")
    return 0


def put_into_slurm(submission: "Submission") -> None:
    """Hand a run to sbatch."""
    from muster.launch.scheduler.slurm_run import submit

    if notes := submit(submission).notes:
        print(f"muster: {notes}", file=sys.stderr)


def put_into_submitit(submission: "Submission") -> None:
    """Hand a run to submitit."""
    from muster.launch.scheduler.submitit_run import submit

    submit(submission)


QUEUES: "dict[str, Callable[[Submission], None]]" = {"slurm": put_into_slurm, "submitit": put_into_submitit}


def leave(prepared: "Prepared", *, snapshot: bool) -> str:
    """Start the run in the background or put it into the queue; return its id.

    Raises:
        UsageError: a run by hand cannot be left to itself.
        MusterError: it could not be started or submitted.
    """
    from muster.jobs.basics.errors import UsageError
    from muster.launch.submit.start import check_torch, detach, write_run

    if prepared.submission.route.transport == "hand":
        raise UsageError("--on hand: node 0's line is the supervisor, and stays; use muster run, or nohup around it")
    check_torch(prepared.submission)
    submission = write_run(prepared, snapshot=snapshot)
    if prepared.is_queued:
        QUEUES[submission.route.transport](submission)
    else:
        detach(submission.context.run, submission.context.python, submission.context.code)
    return submission.context.run.run_id


def show(prepared: "Prepared") -> int:
    """Print what would be submitted."""
    from muster.launch.commands.plan import commands_of

    if prepared.submission.route.transport == "submitit":
        from muster.launch.scheduler.submitit_run import script as submitit_script

        print(submitit_script(prepared.submission), end="")
    elif prepared.is_queued:
        from muster.launch.scheduler.slurm_run import script

        print(script(prepared.submission), end="")
    else:
        print("\n".join(shlex.join(argv) for argv in commands_of(prepared)))
    return 0


def follow(prepared: "Prepared", *, quiet: bool = False, console: "Console | None" = None) -> int:
    """Put a run into a queue and stay until it has ended; the exit code is its verdict's. `console`: as for `start`."""
    from muster.launch.console import Console

    console = console or Console(quiet=quiet)
    if prepared.submission.route.transport == "submitit":
        from muster.launch.scheduler.submitit_run import run_here
        from muster.launch.submit.start import check_torch, write_run

        check_torch(prepared.submission)
        return run_here(write_run(prepared, snapshot=True), console)
    from muster.launch.scheduler.held_signals import holding_signals
    from muster.launch.scheduler.slurm_follow import follow as follow_slurm

    with holding_signals() as asked:
        leave(prepared, snapshot=True)
        return follow_slurm(prepared.context.run, console, asked)
