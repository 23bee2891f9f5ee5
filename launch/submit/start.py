"""Start a prepared job and supervise it to its verdict, here or in a process that stays behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError, RefusedError, StartTimeoutError
from muster.jobs.basics.files import open_log, write_secret
from muster.jobs.runfolder.rundir import RunDir, make_run
from muster.launch.plan.plan import preload, shared_environment
from muster.launch.plan.submission import Submission
from muster.launch.records.runrows import supervisors
from muster.launch.records.verdict import Verdict
from muster.launch.scheduler.requeue import OwnJob
from muster.launch.submit.prepare import Prepared, this_machine
from muster.launch.submit.routes import make_transport
from muster.launch.supervision.console import Console
from muster.launch.supervision.supervisor import Supervisor
from muster.launch.transports.local import Local

DETACH_S: Final = 20.0
POLL_S: Final = 0.02


def start(prepared: Prepared, *, quiet: bool = False, console: Console | None = None) -> Verdict:
    """Make the run folder and everything in it, then supervise from this process; `console` shows it, or ours does.

    Raises:
        RunFolderError, StorageError: the run folder cannot be written; nothing was started.
    """
    check_torch(prepared.submission)
    return supervise(write_run(prepared), console or Console(quiet=quiet))


def check_torch(submission: Submission) -> None:
    """Refuse a job whose ranks would lack torch, where that can be seen from here.

    Raises:
        RefusedError: this machine's ranks need torch, and this interpreter has none.
    """
    context = submission.context
    ours = submission.route.transport == "local" and context.python == sys.executable
    if ours and context.entry is not None and find_spec("torch") is None:
        raise RefusedError(f"{context.python}: has no torch, which a {context.job.kind}: job needs; run ./setup.sh")


def write_run(prepared: Prepared, *, snapshot: bool = False) -> Submission:
    """Make the run folder, with what was submitted; with a snapshot the run uses the code as it is now.

    Raises:
        RefusedError: what is to be copied is too much to be code.
        RunFolderError, StorageError: it cannot be written.
    """
    submission, context = prepared.submission, prepared.context
    make_run(context.run, shared=context.site.share == "group")
    write_secret(context.run.job, prepared.job_text)  # the values of env: and -x are in it
    write_secret(context.run.site, prepared.site_text)
    if snapshot:
        from muster.launch.submit.snapshot import take

        program = context.entry is None
        argv = context.command if program else ()
        try:
            taken = take(context.run, workdir=Path(context.workdir), program=program, argv=argv)
        except MusterError:
            shutil.rmtree(context.run.path, ignore_errors=True)  # nothing was submitted
            raise
        for note in taken.notes:
            print(f"muster: {note}", file=sys.stderr)
        context = replace(context, code=str(taken.code), workdir=str(taken.workdir))
        submission = replace(submission, context=context)
    submission.write()
    return submission


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
    """Start the import of torch before anything else, where the ranks will be forked on this very machine."""
    context, machine = submission.context, this_machine()
    threads = context.job.threads_per_rank
    number = max(1, len(machine.cores) // context.placement.world_size) if threads == "auto" else threads
    environment = {each.name: each.value for each in shared_environment(context, machine, number)}
    transport.warm_up(preload(context), environment)


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
