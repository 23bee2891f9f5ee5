"""Run the points of a sweep: one after another here, or as arrays of Slurm's, one for each shape.

here     every point is started and supervised from this process; Ctrl-C stops the point and the sweep, and so does
         stop.json in the sweep's folder, which `muster stop SWEEP` writes
arrays   points that ask Slurm for the same are one array, for its elements share what they ask for; directly by sbatch,
         or through submitit. Then all are followed to their ends (launch/sweeps/sweep_follow.py)
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError, StoppedError
from muster.jobs.basics.files import write_secret
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.plan.spares import crew_size
from muster.launch.plan.submission import Route, Submission
from muster.launch.records.eventlog import EventLog
from muster.launch.records.runrows import read_rows
from muster.launch.records.slurm_job import SlurmJob, kept_environment, output_path, this_process
from muster.launch.scheduler import submitit_run
from muster.launch.scheduler.held_signals import BY_SIGNAL, ended_by_signal
from muster.launch.scheduler.slurm_run import TRANSPORT, close, cores_of, settings_of
from muster.launch.submit.prepare import Prepared
from muster.launch.submit.start import check_torch, copied, stay, write_run
from muster.launch.supervision.console import Console
from muster.launch.sweeps.sweep import Point, say
from muster.slurm.client import Client, SubmissionRefusedError
from muster.slurm.refusals import refusal
from muster.slurm.script import Array, job_environment, options_of, sbatch_text
from muster.slurm.states import Outcome


@dataclass(frozen=True)
class Element:
    """One point of a sweep on its way: what was prepared for it."""

    point: Point
    prepared: Prepared

    @property
    def run(self) -> RunDir:
        """The folder of its run."""
        return self.prepared.context.run


def is_array(route: Route) -> bool:
    """Say whether the points go into Slurm's queue together."""
    return route.is_queued and not route.is_here


# One after another -------------------------------------------------------------------------------------------------


def run_here(elements: Sequence[Element], folder: Path, *, keep_going: bool) -> bool:
    """Run the points of the sweep in `folder` one after another; return False when the user stopped it."""
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
    if stop.exists():  # whoever wrote it before this folder was made knows nothing of this run
        raise StoppedError("stopped by muster stop before it began")
    return stay(submission, Console(quiet=True))


# Arrays ------------------------------------------------------------------------------------------------------------


def submit_arrays(elements: Sequence[Element], folder: Path, *, limit: int | None) -> None:
    """Submit the points, one array for each shape; a shape that is refused ends its points, and no others.

    Raises:
        RefusedError: the code is too much to be copied.
        RunFolderError, StorageError: a run folder cannot be written.
    """
    submissions = _write_runs([element.prepared for element in elements], folder)
    for index, members in enumerate(group(submissions)):
        name = f"{folder.name}-{index}"
        try:
            if submissions[0].route.transport == "submitit":
                ids = submitit_run.submit_array(members, name=name, limit=limit, folder=folder / "submitit")
            else:
                ids = submit_array(members, name=name, folder=folder, limit=limit)
            say(f"Slurm job {ids[0].partition('_')[0]}: {len(members)} of {len(elements)} points")
        except MusterError as error:
            say(f"muster: {error}")
            for each in members:
                close(each.context.run, Outcome(error.exit_code, str(error)))


def group(submissions: Sequence[Submission]) -> list[list[Submission]]:
    """Put together what asks Slurm for the same, in order of the first of each."""
    groups: dict[str, list[Submission]] = {}
    for each in submissions:
        job = each.context.job
        settings = settings_of(each.context).model_dump(mode="json")
        groups.setdefault(json.dumps([crew_size(job), cores_of(job), settings, each.context.code]), []).append(each)
    return list(groups.values())


def submit_array(members: Sequence[Submission], *, name: str, folder: Path, limit: int | None) -> list[str]:
    """Submit runs as one array, note each one's number in its folder, and return the numbers.

    Raises:
        RefusedError: sbatch refuses, or Slurm is not on this machine.
        UnreachableError: the controller does not answer.
    """
    context, hosts = members[0].context, members[0].route.hosts
    settings, nodes = settings_of(context), crew_size(context.job)
    short = f"array{name.removeprefix(folder.name)}"
    points = folder / f"{short}.runs"
    array = Array(points, len(members), limit)
    argv = module_argv(context.python, "muster.launch.supervise", context.code)
    cores = cores_of(context.job)
    shape = {"name": name, "folder": folder, "nodes": nodes, "settings": settings, "cpus_per_task": cores}
    script = folder / f"{short}.sh"
    write_secret(points, "".join(f"{each.context.run.path}\n" for each in members))
    write_secret(script, sbatch_text(argv=argv, array=array, **shape))  # type: ignore[arg-type]
    for each in members:
        EventLog(each.context.run).submitted(each.context, TRANSPORT)
    base = {**os.environ, **hosts.environment}
    environment = job_environment(options_of(array=array, **shape), base)  # type: ignore[arg-type]
    client = Client(base)
    try:
        submitted = client.submit(script, name=name, environment=environment)
    except SubmissionRefusedError as error:
        raise refusal(str(error), settings, nodes, partitions=client.partitions()) from error
    ids = [f"{submitted.job_id}_{index}" for index in range(len(members))]
    for each, job_id in zip(members, ids, strict=True):
        run = each.context.run
        kept = kept_environment(base)
        job = SlurmJob(job_id=job_id, name=name, cluster=submitted.cluster, environment=kept, **this_process())
        job.write(run)
        # Slurm writes an array's output into one folder; who reads a run looks for its own.
        output = output_path(run, job)
        output.symlink_to(folder / output.name)
    return ids


def _write_runs(prepared: Sequence[Prepared], folder: Path) -> list[Submission]:
    """Make all run folders. They share one copy of the code, unless their working folders differ."""
    if len({(each.context.workdir, each.context.entry is None) for each in prepared}) > 1:
        return [write_run(each, snapshot=True) for each in prepared]
    changes = copied(prepared[0].context, RunDir(folder))
    return [write_run(each.changed(**changes)) for each in prepared]
