"""Find and end the processes of a run through /proc (Linux only).

A pid alone does not identify a process for long, because the kernel reuses it. So a process is identified by (pid,
start), where `start` is its start time in clock ticks after boot (field 22 of /proc/PID/stat, see proc(5)). A process
belongs to a run if the environment with which it was *executed* names the run. Children inherit that environment across
fork, setsid and nohup, and later changes of `os.environ` do not affect it. A program whose parent replaced its
environment is not found. A zombie counts as gone, because it runs no code and only its parent can remove it.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muster.jobs.hosts import ranks
from muster.jobs.machine import procfs
from muster.jobs.machine.procfs import start_ticks as start_ticks

POLL_S: Final = 0.02


def is_same(pid: int, ticks: int) -> bool:
    """Return whether a pid still belongs to the process that began at `ticks`."""
    return start_ticks(pid) == ticks


def of_run(run_id: str) -> list[int]:
    """List this user's processes that were started for a run, except this process and its ancestors."""
    return list(started_for(run_id))


def started_for(run_id: str) -> dict[int, int]:
    """Return the processes of `of_run` as {pid: start ticks}."""
    mark = b"\0" + f"{ranks.RUN_ID}={run_id}".encode() + b"\0"
    spared = with_ancestors(os.getpid())
    candidates = {pid: start_ticks(pid) for pid in _own_pids() if pid not in spared}
    # The ticks are read before the environment and compared after it, so both belong to one process.
    return {
        pid: ticks
        for pid, ticks in candidates.items()
        if ticks is not None and mark in b"\0" + _environment(pid) + b"\0" and is_same(pid, ticks)
    }


def command_line(pid: int) -> str:
    """Return a process's command line, shortened for a message; `?` if the process is gone."""
    words = procfs.text_of(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return (words[:117] + "..." if len(words) > 120 else words) or "?"


def end(found: Mapping[int, int], *, term_s: float = 1.0, kill_s: float = 5.0) -> list[int]:
    """Send TERM, wait up to `term_s`, send KILL, wait up to `kill_s`; return the pids that survive.

    `found` maps pids to start ticks, so that no other process is signalled if a pid is reused.
    """
    alive = dict(found)
    for number, wait_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        for pid, ticks in alive.items():
            send(pid, ticks, number)
        alive = _wait_gone(alive, wait_s)
    return sorted(alive)


def kill_run(run_id: str, *, term_s: float = 1.0, kill_s: float = 5.0) -> list[int]:
    """End every process of a run on this host, also those forked in the meantime; return the pids that survive."""
    end(started_for(run_id), term_s=term_s, kill_s=kill_s)
    deadline = time.monotonic() + kill_s
    while (found := started_for(run_id)) and time.monotonic() < deadline:
        end(found, term_s=0.0, kill_s=max(0.0, deadline - time.monotonic()))
    return list(found)


def send(pid: int, ticks: int, number: signal.Signals) -> bool:
    """Signal a process if it is still the one that began at `ticks`; return whether the signal was sent.

    A pidfd refers to the process that had the pid when it was opened, even if the pid is reused after the comparison.
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
    """Return the environment with which a process was executed; empty for a zombie or an unreadable process."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def with_ancestors(pid: int) -> set[int]:
    """Return the pids of a process and its ancestors, so that a process does not end the ones that started it."""
    family: set[int] = set()
    while pid > 0 and pid not in family:
        family.add(pid)
        fields = procfs.stat(pid)
        pid = int(fields[procfs.PARENT]) if fields is not None else 0
    return family
