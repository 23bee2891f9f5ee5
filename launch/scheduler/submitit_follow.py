"""Follow a run of submitit's local executor through its folder, and show rank 0's output, or every rank's."""

import signal
import subprocess
import time
from collections.abc import Callable
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError
from muster.jobs.basics.reading import read_end
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes
from muster.launch.common.follow import CHUNK_BYTES
from muster.launch.records.runrows import number, read_rows, supervisors
from muster.launch.records.runstate import read_state
from muster.launch.scheduler.held_signals import listening, request_stop
from muster.launch.scheduler.rank_outputs import RunOutput
from muster.launch.scheduler.slurm_run import close, show_end
from muster.launch.supervision.console import Console
from muster.slurm.states import JobOutcome

POLL_S: Final = 0.1


def ended_early(run: RunDir) -> MusterError:
    """Return the error of a submitit job that ended before its supervisor began, and write the run's last row."""
    logs = [run.supervisor_log, *sorted(run.submitit.glob("*_0_log.err"))[-1:]]
    said = "".join(read_end(log, CHUNK_BYTES).decode(errors="replace") for log in logs)
    error = failure(said, exits.REFUSED)
    close(run, JobOutcome(error.exit_code, str(error)))
    return error


def failure(said: str, code: int | None) -> MusterError:
    """Turn the last line printed by one of our processes into the error that it describes."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    error = MusterError(last.removeprefix("muster: ") or f"submitit ended with code {code}")
    error.exit_code = code if code is not None and code > 0 else 1
    return error


def follow_local(run: RunDir, start: Callable[[], "subprocess.Popen[bytes]"], console: Console) -> int:
    """Start a run with the local executor, and follow it until submitit has ended. submitit may restart it.

    The first Ctrl-C stops the run, the second stops it at once.

    Raises:
        UnreachableError: if submitit ended before the run began.
    """
    output, asked = RunOutput(run, console), 0
    before, controller = supervisors(run), start()
    with listening([]) as signals:
        while controller.poll() is None or _goes_on(run):
            output.read()
            if len(signals) > asked:
                asked = len(signals)
                _ask_to_stop(run, console, signals[-1], now=asked > 1)
            time.sleep(POLL_S)
    output.read()
    output.pass_on(last=True)
    if supervisors(run) == before:
        raise ended_early(run)
    rows = read_rows(run)
    if rows.ended is None:
        close(
            run,
            JobOutcome(
                exits.UNREACHABLE, f"submitit's job ended, and its supervisor left no verdict; see {run.submitit}"
            ),
        )
        rows = read_rows(run)
    ended = rows.ended or {}
    show_end(run, console, ended)
    return number(ended.get("code")) or 0


def _goes_on(run: RunDir) -> bool:
    """Return whether a supervisor still runs after the process that called submitit has ended."""
    return run.events.exists() and not read_state(run).is_over


def _ask_to_stop(run: RunDir, console: Console, by: str, *, now: bool) -> None:
    """Ask the supervisor to stop the run. `now`: send it SIGTERM, which stops the run at once."""
    console.say(f"stopping the run: {by}")
    if not now:
        request_stop(run, None, text=f"stopped by {by}")
        return
    submitted = read_rows(run).submitted
    pid, ticks = number(submitted.get("pid")), number(submitted.get("pid_start"))
    if pid is not None and ticks is not None:
        processes.send(pid, ticks, signal.SIGTERM)
