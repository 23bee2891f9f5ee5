"""Stop one run, in a way that depends on its state.

supervisor lives, or is on another host   stop.json → a drain, if the run saves → its `ended` row
a Slurm job                               waiting: scancel; running: stop.json, its `ended` row, then scancel
supervisor is gone (this host)            find the run's processes: TERM, 1 s, KILL; write the `ended` row for it
no supervisor (started directly)          TERM to the run's processes on this host, KILL after the grace period
"""

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import StartTimeoutError, UnreachableError
from muster.jobs.basics.files import append_line
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes, screen
from muster.launch.records.runrows import read_rows
from muster.launch.records.runstate import DIRECT, RunState, is_here, read_state
from muster.launch.scheduler.held_signals import request_stop

POLL_S: Final = 0.1
BEYOND_GRACE_S: Final = 10.0
LEFTOVER_TERM_S: Final = 1.0
KILL_S: Final = 5.0


@dataclass(frozen=True)
class StopOutcome:
    """The result of `muster stop`."""

    state: RunState
    was_over: bool
    leftovers: int | None = None  # number of processes that this command ended; None if a supervisor ended the run

    def to_json(self) -> dict[str, Any]:
        """Return the record for --json."""
        state = self.state
        return {
            "run_id": state.run_id,
            "state": state.state,
            "class": state.class_name,
            "code": state.code,
            "message": state.message,
            "was_over": self.was_over,
            "leftovers": self.leftovers,
        }

    def sentence(self) -> str:
        """Describe the result in one line."""
        state = self.state
        if self.was_over:
            return f"{state.run_id} had ended already: {state.outcome or state.state}"
        if self.leftovers is not None:
            return f"{state.run_id} is closed: {state.message}"
        return f"{state.run_id} ended after {screen.duration(state.seconds)}: {state.outcome or state.state}"


def stop(run: RunDir, *, grace_s: float | None, now: bool) -> StopOutcome:
    """Stop a run in the way that its state requires.

    Raises:
        UnreachableError: if the run was started directly, on another host.
        StartTimeoutError: if the run does not end in time, or one of its processes cannot be ended.
    """
    state = read_state(run)
    grace = 0.0 if now else state.grace_s if grace_s is None else grace_s
    if state.is_over and state.state != "lost":
        return StopOutcome(state, was_over=True)
    if run.slurm.exists():
        from muster.launch.scheduler.slurm_follow import cancel

        cancel([run], grace_s=grace, now=now)
        return StopOutcome(read_state(run), was_over=False)
    if state.state == "lost" and state.sure:
        return end_leftovers(run, term_s=0.0 if now else LEFTOVER_TERM_S, message="supervisor was gone")
    if state.transport == DIRECT:
        if not is_here(state.host):
            raise UnreachableError(
                f"{run.run_id}: it was started directly on {state.host}; there, run: {run.command('stop')}"
            )
        return end_leftovers(run, term_s=grace, message="started directly")
    request_stop(run, grace, now=now)
    return _wait(run, state, grace, term_s=0.0 if now else LEFTOVER_TERM_S)


def _wait(run: RunDir, state: RunState, grace_s: float, *, term_s: float) -> StopOutcome:
    """Wait for the supervisor's last row, and longer if the ranks save. If the supervisor dies, end the run here."""
    patience_s = grace_s + BEYOND_GRACE_S
    deadline, drains = time.monotonic() + patience_s, False
    while time.monotonic() < deadline:
        state = read_state(run)
        drain = read_rows(run).told.get("draining")
        if drain is not None and not drains:
            drains = True
            now = run.command("stop --now")
            print(f"muster: {run.run_id} saves first; to stop it without waiting: {now}", file=sys.stderr)
            patience_s += drain.get("deadline_s", 0.0)
            deadline = time.monotonic() + patience_s
        if state.state == "lost" and state.sure:
            return end_leftovers(run, term_s=term_s, message="supervisor was gone")
        if state.is_over:
            return StopOutcome(state, was_over=False)
        time.sleep(POLL_S)
    raise StartTimeoutError(
        f"{run.run_id}: asked to stop, but it has not ended within {patience_s:g} s; "
        f"look at its supervisor, pid {state.pid} on {state.host}"
    )


def end_leftovers(run: RunDir, *, term_s: float, message: str) -> StopOutcome:
    """End the run's processes on this host, and write the last row, because the supervisor is gone."""
    found = _leftovers(run)
    for pid in found:
        print(f"muster: ending process {pid}: {processes.command_line(pid)}", file=sys.stderr)
    left = processes.end(found, term_s=term_s, kill_s=KILL_S)
    left += processes.kill_run(run.run_id, term_s=0.0, kill_s=KILL_S)
    if left:
        raise StartTimeoutError(
            f"{run.run_id}: processes {', '.join(map(str, sorted(set(left))))} survive KILL; they hang in the "
            "kernel (waiting for a disk or a GPU that does not answer): see dmesg"
        )
    state = read_state(run)
    if state.state == "lost" or not state.is_over:
        plural = "es" * (len(found) != 1)
        append_line(
            run.events,
            {
                "time": time.time(),
                "event": "ended",
                "attempt": state.attempt,
                "code": exits.STOPPED,
                "class": exits.class_of(exits.STOPPED),
                "message": f"{message}; {len(found)} leftover process{plural} ended",
            },
        )
        state = read_state(run)
    return StopOutcome(state, was_over=False, leftovers=len(found))


def _leftovers(run: RunDir) -> dict[int, int]:
    """Return the run's processes on this host as {pid: start ticks}, found by run id and from the run's rows.

    A row identifies a process by pid and start ticks; a pid without ticks is ignored. Rows are needed because the ranks
    of a direct run get the run id only after they have started, so it is not in their environment.
    """
    rows = read_rows(run)
    recorded: dict[int, int] = {}
    first = rows.submitted
    if is_here(first.get("host")) and first.get("transport") == DIRECT and {"pid", "pid_start"} <= first.keys():
        recorded[first["pid"]] = first["pid_start"]
    for row in rows.started:
        if is_here(row.get("host")):
            ticks = dict(row.get("ticks", ()))
            recorded |= {pid: ticks[rank] for rank, pid in row.get("ranks", ()) if rank in ticks}
    same = {pid: ticks for pid, ticks in recorded.items() if processes.is_same(pid, ticks)}
    spared = processes.with_ancestors(os.getpid())
    return {pid: ticks for pid, ticks in {**same, **processes.started_for(run.run_id)}.items() if pid not in spared}
