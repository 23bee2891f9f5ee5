"""Start a prepared job and supervise it until its verdict, in this process or in a detached one."""

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
from muster.launch.submit.prepare import PreparedSubmission, this_machine
from muster.launch.submit.routes import make_transport
from muster.launch.supervision.console import Console
from muster.launch.supervision.supervisor import Supervisor
from muster.launch.transports.local import Local

DETACH_S: Final = 20.0
POLL_S: Final = 0.02


def begin(
    prepared: PreparedSubmission,
    console: Console,
    *,
    detach: bool = False,
    write: Callable[[PreparedSubmission], Submission] | None = None,
) -> int:
    """Write a run's folder, then supervise the run to its end, or detach it; return the exit code.

    `write` replaces `write_run` for a run that already has a folder. A queued or detached run gets a copy of the code.

    Raises:
        UsageError: if a run by hand is to be detached.
        RunFolderError, StorageError: if the run folder cannot be written; nothing has been started then.
        MusterError: if the run cannot be started or submitted.
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
    """Refuse to detach a run by hand, because the pasted line is its supervisor.

    Raises:
        UsageError: if the run is started by hand.
    """
    if route.transport == "hand":
        raise UsageError("--on hand: cannot be detached: node 0's line supervises the run; use muster run, or nohup")


def check_torch(submission: Submission) -> None:
    """Refuse a job whose ranks would lack torch, if that can be determined here.

    Raises:
        RefusedError: if this machine's ranks need torch, and this interpreter has none.
    """
    context = submission.context
    ours = submission.route.transport == "local" and context.python == sys.executable
    if ours and context.entry is not None and not context.warm_python and find_spec("torch") is None:
        raise RefusedError(f"{context.python}: has no torch, which a {context.job.kind}: job needs; run ./setup.sh")


def write_run(prepared: PreparedSubmission, *, snapshot: bool = False) -> Submission:
    """Make the run folder of a submission. With `snapshot`, the run uses a copy of the current code.

    Raises:
        RefusedError: if the working folder is too large to be copied as code.
        RunFolderError, StorageError: if the folder cannot be written.
    """
    submission, context = prepared.submission, prepared.context
    make_run(context.run, shared=context.site.share == "group")
    write_secret(context.run.job, prepared.loaded.text)  # values of env: and -x may be secret
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
    """Copy the code into a folder; return the context values to change. Errors as for `snapshot.take`."""
    from muster.launch.submit.snapshot import take

    settings = context.job.settings
    program = context.entry is None or (isinstance(settings, TrainSettings | TimingSettings) and bool(settings.makes))
    argv = context.command if context.entry is None else ()
    taken = take(folder, workdir=Path(context.workdir), program=program, argv=argv)
    for note in taken.notes:
        print(f"muster: {note}", file=sys.stderr)
    return {"code": str(taken.code), "workdir": str(taken.workdir)}


def leave(submission: Submission) -> None:
    """Start a run in the background, or submit it to its queue."""
    if submission.route.is_queued:
        put_into_queue(submission)
    else:
        detach(submission.context.run, submission.context.python, submission.context.code)


def stay(submission: Submission, console: Console) -> int:
    """Supervise a run from this process, or follow it through its queue; return the exit code of its verdict."""
    if not submission.route.is_queued:
        return supervise(submission, console).code
    from muster.launch.scheduler.held_signals import holding_signals
    from muster.launch.scheduler.slurm_follow import follow

    with holding_signals() as asked:
        put_into_queue(submission)
        return follow(submission.context.run, console, asked)


def put_into_queue(submission: Submission) -> None:
    """Submit a run to Slurm, by sbatch or through submitit."""
    from muster.launch.scheduler.queueing import submit

    if notes := submit([submission]).notes:
        print(f"muster: {notes}", file=sys.stderr)


def whereabouts(run: RunDir) -> str:
    """Describe a detached run for a message: it has begun, or it is a Slurm job."""
    job = SlurmJob.read(run)
    return "has begun" if job is None else f"is Slurm job {job.job_id}"


def supervise(submission: Submission, console: Console, own_job: OwnJob | None = None) -> Verdict:
    """Supervise the next attempts of a submitted run in this process. `own_job`: the scheduler's job that contains it.

    Raises:
        RefusedError: if the run's transport cannot be used here.
    """
    transport = make_transport(submission)
    if isinstance(transport, Local):
        warm_up(submission, transport)
    return asyncio.run(Supervisor(submission.context, transport, console, own_job).run())


def warm_up(submission: Submission, transport: Local) -> None:
    """Start to import torch early, if the ranks will be forked on this machine.

    A job's own Python cannot start early, because it may need the setup lines.
    """
    context, machine = submission.context, this_machine()
    if context.warm_python and context.has_setup:
        return
    threads = context.job.threads_per_rank
    number = max(1, len(machine.cores) // context.placement.world_size) if threads == "auto" else threads
    environment = {each.name: each.value for each in shared_environment(context, machine, number)}
    transport.warm_up(preload(context), environment, context.warm_python)


def detach(run: RunDir, python: str, code: str | None) -> None:
    """Start a detached supervisor, which outlives this process and its terminal; return once it has taken over.

    Raises:
        MusterError: if the supervisor ended at once, with the supervisor's message.
        StartTimeoutError: if the supervisor did not take over in time.
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
    raise StartTimeoutError(f"the supervisor did not start within {DETACH_S:g} s; see {run.supervisor_log}")
