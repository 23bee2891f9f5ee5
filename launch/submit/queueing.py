"""Leave a run to itself or to a queue; or put it into a queue, and stay until it has ended."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.plan.submission import Submission
    from muster.launch.submit.prepare import Prepared
    from muster.launch.supervision.console import Console


def whereabouts(run: "RunDir") -> str:
    """Return what became of a run that was left to itself: the job of Slurm's that it is, or that it has begun."""
    from muster.launch.records.slurm_job import SlurmJob

    job = SlurmJob.read(run)
    return "has begun" if job is None else f"is Slurm job {job.job_id}"


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


def leave(prepared: "Prepared", *, snapshot: bool) -> "RunDir":
    """Start the run in the background or put it into the queue; return its folder.

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
    return submission.context.run


def follow(prepared: "Prepared", *, quiet: bool = False, console: "Console | None" = None) -> int:
    """Put a run into a queue and stay until it has ended; the exit code is its verdict's. `console`: as for `start`."""
    from muster.launch.supervision.console import Console

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
