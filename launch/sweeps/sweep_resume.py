"""Resume a sweep that was stopped, or whose process was lost: run the points that are not finished.

point       done, failed     stays as it is
            not begun        starts from the submission in its run folder
            stopped, lost    continues in its run folder if its job can resume; otherwise a new run replaces it
"""

from dataclasses import replace
from pathlib import Path

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import write_secret
from muster.jobs.basics.reading import read_bytes
from muster.jobs.runfolder.rundir import RunDir, make_run, run_path
from muster.jobs.spec.job import Job
from muster.launch.plan.submission import Submission
from muster.launch.records.runstate import RunState
from muster.launch.submit import resume
from muster.launch.submit.claim import claimed
from muster.launch.submit.request import Request
from muster.launch.sweeps.sweep import SweepPoint, SweepRecord, say
from muster.launch.sweeps.sweep_run import PointRun
from muster.launch.sweeps.sweep_show import states_of

FINISHED = ("done", "failed")


def remaining(record: SweepRecord, folder: Path) -> list[tuple[SweepPoint, RunDir, RunState | None]]:
    """Return the points that are not finished, with their runs and states.

    Raises:
        RefusedError: if a run of the sweep is still alive.
    """
    found = []
    for point, run, state in zip(record.points, record.runs(folder), states_of(record, folder), strict=True):
        if state is not None and not state.is_over:
            resume.refuse_running(run, state)
        if state is None or state.state not in FINISHED:
            found.append((point, run, state))
    return found


def again(
    record: SweepRecord, folder: Path, points: list[tuple[SweepPoint, RunDir, RunState | None]]
) -> tuple[SweepRecord, list[PointRun]]:
    """Write the submissions of the remaining points; return the record, with the ids of new runs, and the points.

    Raises:
        RefusedError, NoCheckpointError, RunFolderError, StorageError: as for `muster resume` of a run.
    """
    RunDir(folder).stop.unlink(missing_ok=True)
    made, run_ids = [], list(record.run_ids)
    for point, run, state in points:
        if not run.path.is_dir():
            raise RefusedError(f"{run.run_id}: its folder is gone, so the sweep cannot be resumed; start a new sweep")
        if state is None:
            run.stop.unlink(missing_ok=True)
            submission = Submission.read(run)
        elif can_resume(job := Submission.read(run).context.job):
            with claimed(run):
                submission = resume.write(resume.again(run, Request(on=None), None, say), ())
        else:
            submission = anew(run, job.name)
            run_ids[point.index] = submission.context.run.run_id
        made.append(PointRun(point, submission))
    record = replace(record, run_ids=tuple(run_ids))
    record.write(folder)
    return record, made


def can_resume(job: Job) -> bool:
    """Return whether a run of the job can resume: it executes a program, or trains with checkpoints."""
    return job.kind == "command" or (job.kind == "train" and job.checkpoint is not None)


def anew(before: RunDir, name: str) -> Submission:
    """Write the folder of a new run with the settings of an earlier one. Errors as for `make_run`."""
    earlier = Submission.read(before)
    run = RunDir(run_path(before.path.parent, name))
    make_run(run, shared=earlier.context.site.share == "group")
    for old, new in ((before.job, run.job), (before.site, run.site)):
        write_secret(new, read_bytes(old).decode())
    submission = replace(earlier, context=replace(earlier.context, run=run, attempt=0))
    submission.write()
    return submission
