"""The task that submitit runs on each node. See `launch/scheduler/submitit_run.py`.

    task 0   runs the supervisor as a child, with node 0's agent    the supervisor's address goes to rendezvous.json
    task k   runs node k's agent as a child, as soon as that file exists

A task reads its number from submitit's environment. Before the time limit or on preemption, submitit calls `checkpoint`
in task 0: the run saves and ends its attempt, and the requeued task continues the same run.

submitit's own entry point would put the user's folder first on the path, and import code that may have changed since
the submission. So `launch/boot.py` starts Muster's entry point (`main`) instead.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.files import write_json, write_secret
from muster.jobs.basics.ownership import check_folder
from muster.jobs.basics.reading import read_json
from muster.jobs.machine.linux import die_with_parent
from muster.jobs.runfolder.rundir import RunDir

WAIT_S: Final = 120.0  # longest wait for the rendezvous file, which a file server may show a minute late
POLL_S: Final = 0.1
DRAIN_S: Final = 25.0  # the least time for saving: Slurm kills a job 30 s after its time limit (KillWait)
SWEEP_S: Final = 5.0
END_S: Final = 10.0  # time for a child to end after SIGTERM
REQUEUE_TEXT: Final = "submitit requeues the job"


@dataclass
class SubmititTask:
    """The object that submitit pickles: two commands and the run folder.

    The command `agent` does not yet contain the node and the supervisor's address. `drain_s` is the time that the
    supervisor has for saving before the end.
    """

    supervise: list[str]
    agent: list[str]
    run: str
    drain_s: float = DRAIN_S
    _pidfd: int = field(default=-1, repr=False, compare=False)

    def __call__(self) -> int:
        """Run the supervisor (in task 0) or an agent; return its exit code, in task 0 that of the run."""
        import submitit

        rank = submitit.JobEnvironment().global_rank
        return self._agent(rank) if rank else self._supervisor()

    def checkpoint(self) -> Any:
        """Make the run save and end, and return the requeued task; None if there is nothing to requeue.

        submitit calls this in task 0, from a signal handler that interrupts `__call__`.
        """
        from submitit.helpers import DelayedSubmission

        if self._drain() != exits.REQUEUE:
            return None  # the run has ended by itself, or was asked to stop
        return DelayedSubmission(SubmititTask(self.supervise, self.agent, self.run, self.drain_s))

    def _supervisor(self) -> int:
        run = RunDir(Path(self.run))
        code = self._child(self.supervise, {})
        publish(run, {"over": code})  # this ends the other tasks' wait for the supervisor
        return code

    def _agent(self, node: int) -> int:
        told = await_rendezvous(RunDir(Path(self.run)))
        if "over" in told:
            return int(told["over"])
        return self._child([*self.agent, "--node", str(node), *told["arguments"]], told["environment"])

    def _child(self, argv: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a child process and wait for its end. If this process ends first, the child also ends."""
        child = subprocess.Popen(
            argv,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(_begin, os.getpid()),
        )
        self._pidfd = os.pidfd_open(child.pid)
        try:
            select.select([self._pidfd], [], [])
            code = child.wait()
            return code if code >= 0 else exits.SIGNAL_BASE - code
        finally:
            if not _has_ended(self._pidfd, 0.0):
                child.terminate()
                if not _has_ended(self._pidfd, END_S):
                    child.kill()
            child.wait()
            os.close(self._pidfd)
            self._pidfd = -1

    def _drain(self) -> int | None:
        """Ask the supervisor to save and end; return its exit code, or None if it has already ended or has not begun.

        Popen.wait cannot be used, because this signal handler may have interrupted a call of Popen.wait that holds the
        lock.
        """
        run = RunDir(Path(self.run))
        if self._pidfd < 0 or _has_ended(self._pidfd, 0.0) or run.stop.exists():
            return None
        request = {"time": time.time(), "now": False, "code": exits.REQUEUE, "who": "submitit", "text": REQUEUE_TEXT}
        request["grace_s"] = max(0.0, self.drain_s - SWEEP_S)  # this signal is for programs that save by themselves
        write_json(run.stop, request)
        try:
            if not _has_ended(self._pidfd, self.drain_s):
                return exits.REQUEUE  # when this process ends, the supervisor ends, too
        finally:
            run.stop.unlink(missing_ok=True)  # otherwise the next attempt would also stop
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        return ended.si_status if ended is not None else None


def start_key(environ: Mapping[str, str]) -> str:
    """Identify this start of the job, so that files of an earlier start are not mistaken for its own."""
    return f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_RESTART_COUNT') or 0}"


def publish(run: RunDir, told: Mapping[str, Any]) -> None:
    """Publish values for the other tasks of this start, in a file written atomically that only the user can read.

    Raises:
        RunFolderError, StorageError: if it cannot be written.
    """
    write_secret(run.rendezvous, json.dumps({"start": start_key(os.environ), **told}) + "\n")


def await_rendezvous(run: RunDir, wait_s: float = WAIT_S) -> dict[str, Any]:
    """Wait until task 0 of this start has published the supervisor's address.

    Raises:
        TimeoutError: if task 0 has not published it in time.
    """
    key, deadline = start_key(os.environ), time.monotonic() + wait_s
    while time.monotonic() < deadline:
        os.listdir(run.path)  # noqa: PTH208 (makes a file server's client look for new files)
        try:
            told: dict[str, Any] = read_json(run.rendezvous)
        except FileNotFoundError:
            told = {}
        if told.get("start") == key:
            return told
        time.sleep(POLL_S)
    raise TimeoutError(f"{run.rendezvous}: task 0 has not published the supervisor's address within {wait_s:g} s")


def main() -> int:
    """Run a task in place of submitit's own entry point; return its exit code.

    The last argument is submitit's folder.
    """
    try:
        from submitit.core.job_environment import JobEnvironment
        from submitit.core.submission import process_job
        from submitit.core.utils import pickle_load
    except ModuleNotFoundError as error:
        print(f"muster: {sys.executable} on {os.uname().nodename} has no {error.name}; run ./setup.sh", file=sys.stderr)
        return exits.REFUSED
    check_folder(Path(sys.argv[-1]))  # because a pickle in this folder is executed
    # submitit cancels by SIGINT, which a shell may have set to be ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(os.getppid(), signal.SIGINT)
    process_job(sys.argv[-1])
    outcome, code = pickle_load(JobEnvironment().paths.result_pickle)
    return int(code) if outcome == "success" else 1


def _begin(parent: int) -> None:
    """Prepare a child: block Slurm's early signal. Every process of the step gets it, but only the task handles it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    die_with_parent(parent, signal.SIGTERM)


def _has_ended(pidfd: int, wait_s: float) -> bool:
    return bool(select.select([pidfd], [], [], wait_s)[0])


if __name__ == "__main__":
    sys.exit(main())
