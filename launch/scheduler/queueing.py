"""Submit runs to Slurm's queue, by sbatch or through submitit.

A single run becomes a job. Several runs that need the same resources become a job array.

    the `submitted` rows ──→ sbatch or submitit ──→ slurm.json in each run folder; the job's supervisors do the rest
                                    └── refused: the last row of each run
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.files import write_secret
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.plan.plan import Context
from muster.launch.plan.spares import nodes_with_spares
from muster.launch.plan.submission import Submission
from muster.launch.records.eventlog import EventLog
from muster.launch.records.slurm_job import SlurmJob, kept_environment, output_path, this_process
from muster.launch.scheduler import submitit_run
from muster.launch.scheduler.slurm_run import asked_for, close, environment_of, settings_of
from muster.slurm.client import Client, SubmissionRefusedError, Submitted
from muster.slurm.refusals import refusal
from muster.slurm.script import Array, sbatch_text
from muster.slurm.states import JobOutcome


def submit(
    submissions: Sequence[Submission], *, name: str = "", folder: Path | None = None, limit: int | None = None
) -> Submitted:
    """Submit runs that need the same resources and whose folders exist; return Slurm's answer.

    With the `folder` of a sweep, they become one array job called `name` that runs `limit` of them at a time. Without
    it, the only run becomes one job.

    Raises:
        RefusedError: if sbatch refuses, submitit is not installed, or Slurm is not on this machine.
        UnreachableError: if the controller does not answer.
        RunFolderError, StorageError: if a run folder cannot be written.
    """
    first = submissions[0]
    name, base = name or first.context.run.run_id, {**os.environ, **first.route.hosts.environment}
    # Write this row before sbatch runs, because readers use the last row, which must be the supervisor's.
    for each in submissions:
        EventLog(each.context.run).submitted(each.context, each.route.transport)
    try:
        submitted, job_ids = _send(submissions, base, name, folder, limit)
    except MusterError as error:
        for each in submissions:
            close(each.context.run, JobOutcome(error.exit_code, str(error)))
        raise
    kept = kept_environment(base)
    for each, job_id in zip(submissions, job_ids, strict=True):
        run = each.context.run
        job = SlurmJob(job_id=job_id, name=name, cluster=submitted.cluster, environment=kept, **this_process())
        job.write(run)
        # Link the job's output into the run's own folder, where readers look for it.
        home, output = RunDir(folder or run.path), output_path(run, job)
        written = (
            home.submitit / f"{job_id}_0_log.err" if first.route.transport == "submitit" else home.path / output.name
        )
        if written != output:
            output.symlink_to(written)
    return submitted


def _send(
    submissions: Sequence[Submission], base: Mapping[str, str], name: str, folder: Path | None, limit: int | None
) -> tuple[Submitted, list[str]]:
    """Submit the runs; return sbatch's answer, and the job id of each run."""
    context, client = submissions[0].context, Client(base)
    try:
        if submissions[0].route.transport == "submitit":
            job_ids = submitit_run.send(submissions, name=name, limit=limit, folder=folder and RunDir(folder).submitit)
            return Submitted(job_ids[0].partition("_")[0]), job_ids
        array, path = None, context.run.sbatch
        if folder is not None:
            points = folder / f"array{name.removeprefix(folder.name)}.runs"
            array, path = Array(points, len(submissions), limit), points.with_suffix(".sh")
            write_secret(points, "".join(f"{each.context.run.path}\n" for each in submissions))
        write_secret(path, _text(context, name, folder or context.run.path, array))
        submitted = client.submit(path, name=name, environment=environment_of(submissions[0]))
        count = len(submissions)
        return submitted, [submitted.job_id] if array is None else [f"{submitted.job_id}_{k}" for k in range(count)]
    except SubmissionRefusedError as error:
        nodes = nodes_with_spares(context.job)
        raise refusal(str(error), settings_of(context), nodes, partitions=client.partitions()) from error


def script(submission: Submission) -> str:
    """Return the batch script of a submission, as `submit` would write it.

    Raises:
        RefusedError: if the settings of job and site contradict each other.
    """
    context = submission.context
    return _text(context, context.run.run_id, context.run.path)


def _text(context: Context, name: str, folder: Path, array: Array | None = None) -> str:
    argv = module_argv(context.python, "muster.launch.supervise", context.code)
    argv += [] if array else [str(context.run.path)]
    return sbatch_text(argv=argv, array=array, **asked_for(context, name, folder))
