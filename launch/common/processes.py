"""Processes of a run, found and ended through /proc (Linux only).

A pid alone names nobody for long: the kernel reuses it. A process is (pid, start), `start` being the clock ticks
after boot at which it began (field 22 of /proc/PID/stat, see proc(5)). A process belongs to a run when the
environment that it was *executed* with says so: children inherit that across fork, setsid and nohup, and later
changes of `os.environ` do not touch it. A program that its parent gave a fresh environment is not found.

A zombie is gone: it runs nothing, holds nothing, and only its parent can do anything about it.
"""

import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from muster.jobs.hosts import ranks
from muster.jobs.machine import procfs
from muster.jobs.machine.procfs import start_ticks as start_ticks

POLL_S: Final = 0.02


def is_same(pid: int, ticks: int) -> bool:
    """Say whether a pid is still the process that began at `ticks`."""
    return start_ticks(pid) == ticks


def of_run(run_id: str) -> list[int]:
    """List the processes of this user that were started for a run, this process and its ancestors left out."""
    return list(started_for(run_id))


def started_for(run_id: str) -> dict[int, int]:
    """Return the processes of `of_run` with their start ticks."""
    mark = b"\0" + f"{ranks.RUN_ID}={run_id}".encode() + b"\0"
    spared = with_ancestors(os.getpid())
    candidates = {pid: start_ticks(pid) for pid in _own_pids() if pid not in spared}
    # The ticks are read before the environment and compared after it: both are of one process.
    return {
        pid: ticks
        for pid, ticks in candidates.items()
        if ticks is not None and mark in b"\0" + _environment(pid) + b"\0" and is_same(pid, ticks)
    }


def command_line(pid: int) -> str:
    """Return what a process was started with, shortened for a message; `?` when it is gone."""
    words = procfs.text_of(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return (words[:117] + "..." if len(words) > 120 else words) or "?"


def kill_all(pids: Iterable[int], *, term_s: float = 1.0, kill_s: float = 5.0) -> list[int]:
    """Do as `end` does with the processes that have these pids at the call; return the pids that are still there."""
    alive = {pid: ticks for pid in pids if (ticks := start_ticks(pid)) is not None}
    return end(alive, term_s=term_s, kill_s=kill_s)


def end(found: Mapping[int, int], *, term_s: float = 1.0, kill_s: float = 5.0) -> list[int]:
    """Send TERM, wait up to `term_s`, send KILL, wait up to `kill_s`; return the pids that are still there.

    `found` maps pids to start ticks: however soon a pid is reused, no other process is signalled.
    """
    alive = dict(found)
    for number, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        for pid, ticks in alive.items():
            send(pid, ticks, number)
        alive = _wait_gone(alive, wait_s)
    return sorted(alive)


def kill_run(run_id: str, *, term_s: float = 1.0, kill_s: float = 5.0) -> list[int]:
    """End every process of a run on this host, also those that it forks meanwhile; return the pids still there."""
    end(started_for(run_id), term_s=term_s, kill_s=kill_s)
    deadline = time.monotonic() + kill_s
    while (found := started_for(run_id)) and time.monotonic() < deadline:
        end(found, term_s=0.0, kill_s=max(0.0, deadline - time.monotonic()))
    return list(found)


def send(pid: int, ticks: int, number: signal.Signals) -> bool:
    """Signal a process if it is still the one that began at `ticks`; say whether the signal was sent.

    A pidfd keeps meaning the process that had the pid when it was opened, whoever gets the pid after the comparison.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        if not is_same(pid, ticks):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True


def _wait_gone(alive: dict[int, int], wait_s: float) -> dict[int, int]:
    deadline = time.monotonic() + wait_s
    while True:
        alive = {pid: ticks for pid, ticks in alive.items() if is_same(pid, ticks)}
        remaining_s = deadline - time.monotonic()
        if not alive or remaining_s <= 0:
            return alive
        time.sleep(min(POLL_S, remaining_s))


def _own_pids() -> list[int]:
    user = os.getuid()
    pids = []
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                try:
                    if entry.stat().st_uid == user:
                        pids.append(int(entry.name))
                except OSError:
                    continue
    return sorted(pids)


def _environment(pid: int) -> bytes:
    """Return the environment a process was executed with; empty for a zombie, or one that hides it."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def with_ancestors(pid: int) -> set[int]:
    """Return a process and all above it: who must not be ended by what it started."""
    family: set[int] = set()
    while pid > 0 and pid not in family:
        family.add(pid)
        fields = procfs.stat(pid)
        pid = int(fields[procfs.PARENT]) if fields is not None else 0
    return family
