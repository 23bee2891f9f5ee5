"""`python -I launch/boot.py launch.supervise RUN`: supervise a run that was submitted; the next attempt of it.

The detached supervisor of ssh, pdsh and local runs, and what Slurm's batch script becomes.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from muster.jobs.basics import terminal
from muster.jobs.basics.errors import MusterError, RunFolderError
from muster.jobs.runfolder.rundir import open_run
from muster.launch.plan.spares import place_crew
from muster.launch.plan.submission import Submission
from muster.launch.scheduler.requeue import own_job
from muster.launch.submit.prepare import allocated
from muster.launch.submit.start import supervise
from muster.launch.supervision.console import Console


def main() -> int:
    """Supervise the run that is named; the exit code is its verdict's."""
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
    """Put in what only the place of the supervisor tells: the nodes that Slurm has given."""
    if submission.route.transport != "slurm" and submission.route.executor != "slurm":
        return submission
    context = submission.context
    placement, spares = place_crew(context.job, allocated(context.job))
    if context.placement.master_addr and not context.placement.one_host:
        placement = placement.meeting_at(context.placement.master_addr)
    return replace(submission, context=replace(context, placement=placement, spares=spares))


if __name__ == "__main__":
    sys.exit(main())
