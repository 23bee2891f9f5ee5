"""The resources to request from Slurm, and the last row of a run if its supervisor has not written one."""

import os
import time
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.files import append_line
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.job import Job
from muster.jobs.spec.slurm import SIGNAL_S, SlurmSettings, merged, signal_before
from muster.launch.common.event_rows import typed_lines
from muster.launch.plan.plan import Context
from muster.launch.plan.spares import nodes_with_spares
from muster.launch.plan.submission import Submission
from muster.launch.records.advice import next_step
from muster.launch.records.eventlog import EventLog
from muster.launch.records.runrows import number, read_ending, read_rows, read_victims, real
from muster.launch.records.slurm_job import last_row
from muster.launch.records.verdict import Verdict
from muster.launch.supervision.console import Console
from muster.slurm.script import job_environment, options_of
from muster.slurm.states import JobOutcome

SAVING_S: Final = 90  # time before the limit to agree on a step, save after it, and requeue


def settings_of(context: Context) -> SlurmSettings:
    """Return the settings for Slurm. A job with checkpoints is signalled early enough to save before the time limit.

    Raises:
        RefusedError: if the settings of job and site contradict each other.
    """
    site, job = context.site.slurm, context.job.slurm
    settings = merged(site, job)
    if "signal_s" in settings.model_fields_set:
        return settings
    wanted_s = SIGNAL_S if context.job.checkpoint is None else SAVING_S
    return settings.model_copy(update={"signal_s": signal_before(settings.time, wanted_s)})


def asked_for(context: Context, name: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of `options_of`, which makes sbatch's options. Errors as for `settings_of`."""
    job, settings = context.job, settings_of(context)
    return {
        "name": name,
        "folder": folder,
        "nodes": nodes_with_spares(job),
        "settings": settings,
        "cpus_per_task": cores_of(job),
    }


def environment_of(submission: Submission) -> dict[str, str]:
    """Return the environment for submitting a job, without variables of a rank or a surrounding job."""
    context = submission.context
    options = options_of(**asked_for(context, context.run.run_id, context.run.path))
    kept = job_environment(options, {**os.environ, **submission.route.hosts.environment})
    return {name: value for name, value in kept.items() if not name.startswith("SUBMITIT_")}


def cores_of(job: Job) -> int | None:
    """Return how many cores a node's single task needs for its ranks; None if that depends on the node."""
    if job.ranks_per_node == "slots":
        return None
    return job.ranks_per_node * (1 if job.threads_per_rank == "auto" else job.threads_per_rank)


def close(run: RunDir, outcome: JobOutcome, *, anew: bool = False) -> None:
    """Write a run's last row if its supervisor has not. `anew`: ignore the last row of an earlier start.

    Raises:
        RunFolderError, StorageError: if the row cannot be written.
    """
    rows = read_rows(run)
    if rows.ended is not None and not anew:
        return
    attempt = None if anew else number(rows.attempt.get("attempt"))
    if attempt is None:  # no attempt has started, so there is none to judge
        append_line(run.events, last_row(outcome, time.time(), None))
        return
    began = real(rows.attempt.get("time")) or time.time()
    log, verdict = EventLog(run), Verdict(outcome.code, outcome.message)
    log.attempt_ended(attempt, verdict, began)
    log.run_ended(attempt, verdict)


def stopped(by: str, what: str) -> JobOutcome:
    """Return the outcome of a run that was cancelled on request."""
    return JobOutcome(exits.STOPPED, f"stopped by {by} while {what}")


def show_end(run: RunDir, console: Console, ended: dict[str, Any]) -> None:
    """Show how a run ended, as its supervisor would."""
    attempt = ended.get("attempt")
    row = next((row for row in typed_lines(run.attempts) if row.get("attempt") == attempt and attempt is not None), {})
    code, message = number(ended.get("code")) or 0, str(ended.get("message") or "")
    verdict = Verdict(code, message, read_ending(row.get("first")), read_victims(row))
    began = real(row.get("started")) or real(read_rows(run).submitted.get("time"))
    until = real(ended.get("time")) or time.time()
    advice = str(row.get("next_step") or next_step(verdict.name, row.get("first"), message))
    console.end(verdict, until - (until if began is None else began), run, advice)
