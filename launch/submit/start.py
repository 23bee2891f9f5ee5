"""Start a prepared job and supervise it to its verdict, here or in a process that stays behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError, RefusedError, StartTimeoutError, UsageError
from muster.jobs.basics.files import open_log, write_secret
from muster.jobs.runfolder.rundir import RunDir, make_run
from muster.jobs.spec.train import TrainSettings
from muster.jobs.timing.settings import TimingSettings
from muster.launch.plan.plan import Context, preload, shared_environment
from muster.launch.plan.submission import Route, Submission
from muster.launch.records.runrows import supervisors
from muster.launch.records.slurm_job import SlurmJob
from muster.launch.records.verdict import Verdict
from muster.launch.scheduler.requeue import OwnJob
from muster.launch.submit.byhand import by_hand
from muster.launch.submit.prepare import Prepared, this_machine
from muster.launch.submit.routes import make_transport
from muster.launch.supervision.console import Console
from muster.launch.supervision.supervisor import Supervisor
from muster.launch.transports.local import Local

DETACH_S: Final = 20.0
POLL_S: Final = 0.02


def begin(
    prepared: Prepared, console: Console, *, detach: bool = False, write: Callable[[Prepared], Submission] | None = None
) -> int:
    """Write a run's folder, then stay to its end, or leave it to itself; return the exit code.

    `write` is for a run that has a folder. A run in a queue, and one that is left, gets a copy of the code.

    Raises:
        UsageError: a run by hand cannot be left to itself.
        RunFolderError, StorageError: the run folder cannot be written; nothing was started.
        MusterError: it could not be started or submitted.
    """
    if detach:
        check_can_be_left(prepared.route)
    if prepared.route.transport == "hand":
        prepared = by_hand(prepared)
    check_torch(prepared.submission)
    submission = write(prepared) if write else write_run(prepared, snapshot=detach or prepared.route.is_queued)
    if not detach:
        return stay(submission, console)
    leave(submission)
    print(prepared.context.run.run_id)
    print(f"muster: it {whereabouts(prepared.context.run)}", file=sys.stderr)
    return 0


def check_can_be_left(route: Route) -> None:
    """Refuse to leave a run whose supervisor is what was pasted.

    Raises:
        UsageError: it is a run by hand.
    """
    if route.transport == "hand":
        raise UsageError("--on hand: node 0's line is the supervisor, and stays; use muster run, or nohup around it")


def check_torch(submission: Submission) -> None:
    """Refuse a job whose ranks would lack torch, where that can be seen from here.

    Raises:
        RefusedError: this machine's ranks need torch, and this interpreter has none.
    """
    context = submission.context
    ours = submission.route.transport == "local" and context.python == sys.executable
    if ours and context.entry is not None and not context.warm_python and find_spec("torch") is None:
        raise RefusedError(f"{context.python}: has no torch, which a {context.job.kind}: job needs; run ./setup.sh")


def write_run(prepared: Prepared, *, snapshot: bool = False) -> Submission:
    """Make the run folder, with what was submitted; with a snapshot the run uses the code as it is now.

    Raises:
        RefusedError: what is to be copied is too much to be code.
        RunFolderError, StorageError: it cannot be written.
    """
    submission, context = prepared.submission, prepared.context
    make_run(context.run, shared=context.site.share == "group")
    write_secret(context.run.job, prepared.loaded.text)  # the values of env: and -x are in it
    write_secret(context.run.site, prepared.site_text)
    if snapshot:
        try:
            context = replace(context, **copied(context, context.run))
        except BaseException:
            shutil.rmtree(context.run.path, ignore_errors=True)  # nothing was submitted
            raise
        submission = replace(submission, context=context)
    submission.write()
    return submission


def copied(context: Context, folder: RunDir) -> dict[str, Any]:
    """Copy the code into a folder; return what that changes of the context. Errors as `snapshot.take`."""
    from muster.launch.submit.snapshot import take

    settings = context.job.settings
    program = context.entry is None or (isinstance(settings, TrainSettings | TimingSettings) and bool(settings.makes))
    argv = context.command if context.entry is None else ()
    taken = take(folder, workdir=Path(context.workdir), program=program, argv=argv)
    for note in taken.notes:
        print(f"muster: {note}", file=sys.stderr)
    return {"code": str(taken.code), "workdir": str(taken.workdir)}


def leave(submission: Submission) -> None:
    """Start a run in the background, or put it into its queue."""
    if submission.route.is_queued:
        put_into_queue(submission)
    else:
        detach(submission.context.run, submission.context.python, submission.context.code)


def stay(submission: Submission, console: Console) -> int:
    """Supervise a run from this process, or follow it through its queue; return the exit code of its verdict."""
    if not submission.route.is_queued:
        return supervise(submission, console).code
    if submission.route.is_here:
        from muster.launch.scheduler.submitit_run import run_here

        return run_here(submission, console)
    from muster.launch.scheduler.held_signals import holding_signals
    from muster.launch.scheduler.slurm_follow import follow

    with holding_signals() as asked:
        put_into_queue(submission)
        return follow(submission.context.run, console, asked)


def put_into_queue(submission: Submission) -> None:
    """Hand a run to sbatch, or to submitit."""
    if submission.route.is_here:
        from muster.launch.scheduler import submitit_run

        submitit_run.leave(submission)
        return
    from muster.launch.scheduler.queueing import submit

    if notes := submit([submission]).notes:
        print(f"muster: {notes}", file=sys.stderr)


def whereabouts(run: RunDir) -> str:
    """Return what became of a run that was left to itself: the job of Slurm's that it is, or that it has begun."""
    job = SlurmJob.read(run)
    return "has begun" if job is None else f"is Slurm job {job.job_id}"


def supervise(submission: Submission, console: Console, own_job: OwnJob | None = None) -> Verdict:
    """Run an attempt of a submitted run from this process; `own_job` is the scheduler's that it is in.

    Raises:
        RefusedError: its transport cannot be used here.
    """
    transport = make_transport(submission)
    if isinstance(transport, Local):
        warm_up(submission, transport)
    return asyncio.run(Supervisor(submission.context, transport, console, own_job).run())


def warm_up(submission: Submission, transport: Local) -> None:
    """Start the import of torch before anything else, where the ranks will be forked on this very machine.

    A Python of the job's waits for setup lines: they may be what makes it run.
    """
    context, machine = submission.context, this_machine()
    if context.warm_python and context.has_setup:
        return
    threads = context.job.threads_per_rank
    number = max(1, len(machine.cores) // context.placement.world_size) if threads == "auto" else threads
    environment = {each.name: each.value for each in shared_environment(context, machine, number)}
    transport.warm_up(preload(context), environment, context.warm_python)


def detach(run: RunDir, python: str, code: str | None) -> None:
    """Leave a supervisor behind that outlives this process and its terminal; return when it has taken over.

    Raises:
        MusterError: it ended at once; its own words.
        StartTimeoutError: it did not take over in time.
    """
    before = supervisors(run)
    with os.fdopen(open_log(run.supervisor_log), "ab") as log:
        supervisor = subprocess.Popen(
            [*module_argv(python, "muster.launch.supervise", code), str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    deadline = time.monotonic() + DETACH_S
    while time.monotonic() < deadline:
        if supervisors(run) > before:
            return
        if (code_ := supervisor.poll()) is not None:
            said = run.supervisor_log.read_text(errors="replace").strip().removeprefix("muster: ")
            error = MusterError(said or f"the supervisor ended with code {code_}; see {run.supervisor_log}")
            error.exit_code = code_ or 1
            raise error
        time.sleep(POLL_S)
    os.killpg(supervisor.pid, signal.SIGTERM)
    raise StartTimeoutError(f"the supervisor did not begin within {DETACH_S:g} s; see {run.supervisor_log}")
