"""Supervise a submitted run, starting with its next attempt: `python -I launch/boot.py launch.supervise RUN`.

This is the detached supervisor of ssh, pdsh and local runs. Slurm's batch script execs it.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from muster.jobs.basics import terminal
from muster.jobs.basics.errors import MusterError, RunFolderError
from muster.jobs.runfolder.rundir import open_run
from muster.launch.plan.spares import place_with_spares
from muster.launch.plan.submission import Submission
from muster.launch.scheduler.requeue import own_job
from muster.launch.submit.prepare import allocated
from muster.launch.submit.request import QUEUED
from muster.launch.submit.start import supervise
from muster.launch.supervision.console import Console


def main() -> int:
    """Supervise the named run; return the exit code of its verdict."""
    terminal.guard()
    try:
        if len(sys.argv) != 2:
            raise RunFolderError("RUN: name the folder of one run")
        submission = Submission.read(open_run(Path(sys.argv[1]), warn=False))
        own = own_job(submission, os.environ)
        if own is None:
            return supervise(at_home(submission), Console(ranks=False)).code
        if (hopeless := own.begin()) is not None:
            return hopeless.code
        return own.end(supervise(at_home(submission), Console(ranks=False), own if own.by_us else None).code)
    except MusterError as error:
        print(f"muster: {error}", file=sys.stderr)
        return error.exit_code


def at_home(submission: Submission) -> Submission:
    """Fill in the nodes that Slurm allocated, which are known only where the supervisor runs."""
    if submission.route.transport not in QUEUED:
        return submission
    context = submission.context
    placement, spares = place_with_spares(context.job, allocated(context.job))
    if context.placement.master_addr and not context.placement.one_host:
        placement = placement.meeting_at(context.placement.master_addr)
    return replace(submission, context=replace(context, placement=placement, spares=spares))


if __name__ == "__main__":
    sys.exit(main())
