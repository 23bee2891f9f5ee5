"""Start runs through submitit.

The tasks of submitit run `slurm/submitit_job.py`. A run uses one of three executors:

    slurm   one sbatch, an array for several runs (queueing.py); then like any run in Slurm's queue (slurm_follow.py)
    local   submitit's controller on this machine, one task per pretend node; it outlives the process that called it
    debug   in this process: one task, whose supervisor starts all pretend nodes
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import RefusedError, StartTimeoutError, UsageError
from muster.jobs.basics.files import folder_error, open_log
from muster.jobs.basics.reading import parse_json
from muster.launch.plan.submission import Submission
from muster.launch.records.runrows import supervisors
from muster.launch.scheduler.rank_outputs import RunOutput
from muster.launch.scheduler.slurm_run import environment_of
from muster.launch.scheduler.submitit_follow import ended_early, failure, follow_local
from muster.launch.scheduler.submitit_order import order, task_of
from muster.launch.supervision.console import Console
from muster.slurm.client import SubmissionRefusedError

SUBMIT_S: Final = 90.0
BEGIN_S: Final = 30.0
POLL_S: Final = 0.1


def run_here(submission: Submission, console: Console) -> int:
    """Run a submission, whose run folder exists, on this machine; return the exit code of its verdict.

    Raises:
        MusterError: if the run cannot be started.
    """
    if submission.route.executor == "debug":
        return debug(submission, console)
    return follow_local(submission.context.run, partial(start_local, submission), console)


def leave(submission: Submission) -> None:
    """Start a run on this machine, and return when it has begun.

    Raises:
        UsageError: if the run uses submitit's debug executor, which runs in the calling process.
        MusterError: if the run cannot be started.
    """
    run = submission.context.run
    if submission.route.executor == "debug":
        raise UsageError(
            "--executor debug: runs in the calling process, not in the background; use muster run, or another executor"
        )
    before, controller = supervisors(run), start_local(submission)
    deadline = time.monotonic() + BEGIN_S
    while supervisors(run) == before:
        if controller.poll() is not None:
            raise ended_early(run)
        if time.monotonic() > deadline:
            os.killpg(controller.pid, signal.SIGTERM)
            raise StartTimeoutError(f"submitit did not start within {BEGIN_S:g} s; see {run.submitit}")
        time.sleep(POLL_S)
    controller.returncode = 0  # keeps Popen from warning about a process that was detached on purpose


def script(submission: Submission) -> str:
    """Return the script that submitit would submit with sbatch, or the commands that it would run here.

    Raises:
        RefusedError: if submitit is not installed.
    """
    if submission.route.executor == "debug":
        return shlex.join(task_of(submission, os.environ).supervise) + "\n"
    wanted = order([submission], name=submission.context.run.run_id, environ=os.environ)
    if submission.route.executor == "local":
        return "\n".join(shlex.join(wanted["tasks"][0][part]) for part in ("supervise", "agent")) + "\n"
    wanted["dry_run"] = True
    return str(_call(wanted, environment_of(submission))["text"])


def send(submissions: Sequence[Submission], *, name: str, limit: int | None, folder: Path | None) -> list[str]:
    """Make submitit submit runs with the same resources to Slurm; return their job ids. Arguments as for `order`.

    Raises:
        SubmissionRefusedError: if sbatch refuses.
        RefusedError: if submitit is not installed, or Slurm is not on this machine.
        StartTimeoutError: if the controller does not answer.
    """
    wanted = order(submissions, name=name, environ=os.environ, limit=limit, folder=folder)
    told = _call(wanted, environment_of(submissions[0]))
    if said := told.get("refused"):
        raise SubmissionRefusedError(str(said))
    return [str(each) for each in told["job_ids"]]


def start_local(submission: Submission) -> "subprocess.Popen[bytes]":
    """Start submitit's local executor in its own session; the process ends with its job.

    Raises:
        RefusedError: if submitit is not installed.
    """
    run = submission.context.run
    wanted = order([submission], name=run.run_id, environ=os.environ)
    try:
        run.submitit.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise folder_error(run.submitit, error) from error
    with os.fdopen(open_log(run.supervisor_log), "ab") as log:
        process = _start(environment_of(submission), stdout=subprocess.PIPE, stderr=log)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(json.dumps(wanted).encode())
        process.stdin.close()
        if not process.stdout.readline():
            process.wait()
            raise ended_early(run)
    return process


def debug(submission: Submission, console: Console) -> int:
    """Run a submission with submitit's debug executor, in this process; return the exit code of its verdict.

    Raises:
        RefusedError: if submitit is not installed.
    """
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise RefusedError(f"--on submitit: {sys.executable} has no {error.name}; run ./setup.sh") from error
    run = submission.context.run
    executor = submitit.AutoExecutor(run.submitit, cluster="debug")
    job = executor.submit(task_of(submission, os.environ))
    over = threading.Event()
    output = RunOutput(run, console, silent=True)  # the supervisor in this process already prints the events

    def pass_on() -> None:
        while not over.wait(POLL_S):
            output.read()

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    try:
        return int(job.result())
    finally:
        over.set()
        reader.join()
        output.read()
        output.pass_on(last=True)


def _call(wanted: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    process = _start(environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, said = process.communicate(json.dumps(wanted).encode(), timeout=SUBMIT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise StartTimeoutError(f"submitit: did not submit within {SUBMIT_S:g} s; see squeue") from error
    if process.returncode or not out:
        raise failure(said.decode(errors="replace"), process.returncode)
    answer: dict[str, Any] = parse_json(out)
    return answer


def _start(environment: Mapping[str, str], *, stdout: Any, stderr: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        module_argv(sys.executable, "muster.slurm.submitit_submit"),
        env=environment,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )
