"""Run the points of a sweep: one after another here, or as Slurm arrays.

here     every point is started and supervised from this process; Ctrl-C stops the point and the sweep, and so does
         stop.json in the sweep's folder, which `muster stop SWEEP` writes
arrays   points that request the same resources form one array, because its elements share the request; submitted by
         sbatch or through submitit. Then all are followed to their ends (launch/scheduler/slurm_follow.py)
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.jobs.basics.errors import MusterError, StoppedError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.plan.spares import crew_size
from muster.launch.plan.submission import Route, Submission
from muster.launch.records.runrows import read_rows
from muster.launch.scheduler.held_signals import BY_SIGNAL, ended_by_signal, holding_signals, listening
from muster.launch.scheduler.queueing import submit
from muster.launch.scheduler.slurm_follow import Follower, until_ended
from muster.launch.scheduler.slurm_run import close, cores_of, settings_of
from muster.launch.submit.prepare import Prepared
from muster.launch.submit.start import check_torch, copied, stay, write_run
from muster.launch.supervision.console import Console
from muster.launch.sweeps.sweep import Point, say
from muster.slurm.states import Outcome


@dataclass(frozen=True)
class Element:
    """One prepared point of a sweep."""

    point: Point
    prepared: Prepared

    @property
    def run(self) -> RunDir:
        """The folder of its run."""
        return self.prepared.context.run


def is_array(route: Route) -> bool:
    """Return whether the points go into Slurm's queue as arrays."""
    return route.is_queued and not route.is_here


# One after another -------------------------------------------------------------------------------------------------


def run_here(elements: Sequence[Element], folder: Path, *, keep_going: bool) -> bool:
    """Run the points of the sweep in `folder` one after another; return False if the user stopped it."""
    stop = RunDir(folder).stop
    for count, element in enumerate(elements, 1):
        if stop.exists():
            return False
        try:
            say(f"[{count}/{len(elements)}] {element.point.label}")
            code = _run_one(element.prepared, stop)
            say(f"  {(read_rows(element.run).ended or {}).get('message', code)}")
        except (MusterError, KeyboardInterrupt) as caught:
            error = caught if isinstance(caught, MusterError) else StoppedError(BY_SIGNAL[0])
            say(f"muster: {error}")
            code = error.exit_code
            if element.run.path.is_dir():
                close(element.run, Outcome(code, str(error)))
            if error is not caught:
                return False
        if ended_by_signal(element.run):
            return False
        if code and not keep_going:
            break
    return not stop.exists()


def _run_one(prepared: Prepared, stop: Path) -> int:
    check_torch(prepared.submission)
    submission = write_run(prepared)
    if stop.exists():  # it was written before this run's folder existed, so nobody else stops this run
        raise StoppedError("stopped by muster stop before it began")
    return stay(submission, Console(quiet=True))


# Arrays ------------------------------------------------------------------------------------------------------------


def run_in_queue(elements: Sequence[Element], folder: Path, *, limit: int | None) -> bool:
    """Submit the points of the sweep in `folder`, and follow them to their ends; return False if the user stopped it.

    The first Ctrl-C cancels waiting points and has the supervisors stop running ones; the second one cancels all.

    Raises:
        RefusedError: if the working folder is too large to be copied as code.
        RunFolderError, StorageError: if a run folder cannot be written.
    """
    console, quiet = Console(ranks=False), Console(quiet=True)
    with holding_signals() as held:
        submit_arrays(elements, folder, limit=limit)
        labels = {each.run: each.point.label for each in elements if each.run.slurm.exists()}
        with listening(held) as asked:
            followers = [Follower(run, quiet, trouble=console) for run in labels]
            for count, each in enumerate(until_ended(followers, asked, told=console), 1):
                say(f"[{count}/{len(labels)}] {labels[each.run]}: {each.last_row.get('class')}")
    return not asked and not RunDir(folder).stop.exists()


def submit_arrays(elements: Sequence[Element], folder: Path, *, limit: int | None) -> None:
    """Submit the points as arrays. If Slurm refuses an array, only its points end."""
    for index, members in enumerate(group(_write_runs([element.prepared for element in elements], folder))):
        try:
            submitted = submit(members, name=f"{folder.name}-{index}", folder=folder, limit=limit)
            say(f"Slurm job {submitted.job_id}: {len(members)} of {len(elements)} points")
        except MusterError as error:
            say(f"muster: {error}")


def group(submissions: Sequence[Submission]) -> list[list[Submission]]:
    """Group the submissions that request the same resources from Slurm, in the order of each group's first."""
    groups: dict[str, list[Submission]] = {}
    for each in submissions:
        job = each.context.job
        settings = settings_of(each.context).model_dump(mode="json")
        groups.setdefault(json.dumps([crew_size(job), cores_of(job), settings, each.context.code]), []).append(each)
    return list(groups.values())


def _write_runs(prepared: Sequence[Prepared], folder: Path) -> list[Submission]:
    """Make all run folders. They share one copy of the code, unless their working folders differ."""
    if len({(each.context.workdir, each.context.entry is None) for each in prepared}) > 1:
        return [write_run(each, snapshot=True) for each in prepared]
    changes = copied(prepared[0].context, RunDir(folder))
    return [write_run(each.changed(**changes)) for each in prepared]
