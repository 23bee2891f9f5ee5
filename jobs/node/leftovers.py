"""Kill the processes that ranks leave behind: all descendants of the rank parent, found through /proc.

A process that cannot be killed, because it waits for a disk or device (state D) or belongs to another user, is
reported instead of waited for.
"""

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from muster.jobs.machine import linux, procfs

# With 2 s for the ranks it stays below the 3 s after the grace that the supervisor waits for the sweep.
LIMIT_S: Final = 0.8
LOOK_S: Final = 0.05  # a process may start while others are being killed
PAUSE_S: Final = 0.002
GONE: Final = "X"  # the state of a process that no longer exists, see proc(5)


@dataclass(frozen=True)
class Swept:
    """The number of processes found, the reaped children of this process, and the processes that would not die."""

    count: int
    buried: frozenset[int] = field(default_factory=frozenset)
    left: tuple[int, ...] = ()


def kill(pid: int) -> None:
    """Kill a process if permitted."""
    with suppress(PermissionError):  # a user's program may have changed its user (sudo)
        linux.kill_quietly(pid, signal.SIGKILL)


def sweep(
    root: int, *, leave: Collection[int] = (), limit_s: float = LIMIT_S, kill: Callable[[int], None] = kill
) -> Swept:
    """Kill all descendants of `root`, which is this process, except the trees of `leave`; take at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    found: set[int] = set()
    buried: set[int] = set()
    while left := linux.descendants(root, leave=leave):
        found.update(left)
        for pid in left:
            kill(pid)
        now = time.monotonic()
        if now > deadline:
            return Swept(len(found), frozenset(buried), tuple(sorted(left)))
        wait_for_death(min(deadline, now + LOOK_S))
        buried |= bury()
    return Swept(len(found), frozenset(buried | bury()))  # also those that died after the last look


def wait_for_death(deadline: float) -> None:
    """Wait until a child of this process is dead, without reaping it, at most until `deadline` (monotonic seconds)."""
    with suppress(ChildProcessError):  # no child yet: the orphans are about to be adopted
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)


def bury() -> set[int]:
    """Reap the dead children of this process; return their pids."""
    buried = set()
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            buried.add(pid)
    return buried


def state_of(pid: int) -> str:
    """Return the state letter of a process, see proc(5): R runs, S waits, D cannot be killed, T is stopped."""
    fields = procfs.stat(pid)
    return GONE if fields is None else fields[procfs.STATE].decode()


def described(pids: Collection[int]) -> list[dict[str, Any]]:
    """Describe processes: [{"pid", "state", "name"}, ...]."""
    return [{"pid": pid, "state": state_of(pid), "name": procfs.text_of(f"/proc/{pid}/comm") or "?"} for pid in pids]
