"""Execution of a sweep's points, one after another on this machine or as Slurm arrays.

here     This process starts and supervises every point. Ctrl-C stops the current point and the sweep; so does
         stop.json in the sweep's folder, which `muster stop SWEEP` writes.
arrays   Points that request the same resources form one array, because its elements share one request. sbatch or
         submitit submits it. Then all runs are followed until they end (launch/scheduler/slurm_follow.py).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.jobs.basics.errors import MusterError, StoppedError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.plan.spares import nodes_with_spares
from muster.launch.plan.submission import Submission
from muster.launch.records.runrows import read_rows
from muster.launch.scheduler.held_signals import BY_SIGNAL, ended_by_signal, holding_signals, listening
from muster.launch.scheduler.queueing import submit
from muster.launch.scheduler.slurm_follow import RunFollower, until_ended
from muster.launch.scheduler.slurm_run import close, cores_of, settings_of
from muster.launch.submit.start import stay
from muster.launch.supervision.console import Console
from muster.launch.sweeps.sweep import SweepPoint, say
from muster.slurm.states import JobOutcome


@dataclass(frozen=True)
class PointRun:
    """One point of a sweep, and the submission in its run folder."""

    point: SweepPoint
    submission: Submission

    @property
    def run(self) -> RunDir:
        """The folder of the point's run."""
        return self.submission.context.run


# One after another -------------------------------------------------------------------------------------------------


def run_here(points: Sequence[PointRun], folder: Path, *, keep_going: bool) -> bool:
    """Run the points of the sweep in `folder` one after another; return False if the user stopped it."""
    stop = RunDir(folder).stop
    for count, each in enumerate(points, 1):
        if stop.exists():
            return False
        try:
            say(f"[{count}/{len(points)}] {each.point.label}")
            code = stay(each.submission, Console(quiet=True))
            say(f"  {(read_rows(each.run).ended or {}).get('message', code)}")
        except (MusterError, KeyboardInterrupt) as caught:
            error = caught if isinstance(caught, MusterError) else StoppedError(BY_SIGNAL[0])
            say(f"muster: {error}")
            code = error.exit_code
            close(each.run, JobOutcome(code, str(error)))
            if error is not caught:
                return False
        if ended_by_signal(each.run):
            return False
        if code and not keep_going:
            break
    return not stop.exists()


# Arrays ------------------------------------------------------------------------------------------------------------


def run_in_queue(points: Sequence[PointRun], folder: Path, *, limit: int | None) -> bool:
    """Submit the points of the sweep in `folder` and wait until they end; return False if the user stopped the sweep.

    The first Ctrl-C cancels queued points and asks the supervisors of running points to stop. The second one cancels
    all points.

    Raises:
        RunFolderError, StorageError: if a run folder cannot be written.
    """
    console, quiet = Console(ranks=False), Console(quiet=True)
    with holding_signals() as held:
        submit_arrays(points, folder, limit=limit)
        labels = {each.run: each.point.label for each in points if each.run.slurm.exists()}
        with listening(held) as asked:
            followers = [RunFollower(run, quiet, trouble=console) for run in labels]
            for count, each in enumerate(until_ended(followers, asked, told=console), 1):
                say(f"[{count}/{len(labels)}] {labels[each.run]}: {each.last_row.get('class')}")
    return not asked and not RunDir(folder).stop.exists()


def submit_arrays(points: Sequence[PointRun], folder: Path, *, limit: int | None) -> None:
    """Submit the points as arrays. If Slurm refuses an array, only its points fail."""
    for index, members in enumerate(group([each.submission for each in points])):
        try:
            submitted = submit(members, name=f"{folder.name}-{index}", folder=folder, limit=limit)
            say(f"Slurm job {submitted.job_id}: {len(members)} of {len(points)} points")
        except MusterError as error:
            say(f"muster: {error}")


def group(submissions: Sequence[Submission]) -> list[list[Submission]]:
    """Group submissions that request the same resources from Slurm. Groups keep the order of their first members."""
    groups: dict[str, list[Submission]] = {}
    for each in submissions:
        job = each.context.job
        settings = settings_of(each.context).model_dump(mode="json")
        groups.setdefault(json.dumps([nodes_with_spares(job), cores_of(job), settings, each.context.code]), []).append(
            each
        )
    return list(groups.values())
