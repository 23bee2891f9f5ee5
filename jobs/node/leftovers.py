"""Kill the processes that ranks leave behind: all descendants of the rank parent, found through /proc.

A process that cannot be killed, because it waits for a disk or device (state D) or belongs to another user, is
reported but not waited for.
"""

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from muster.jobs.machine import linux, procfs

# This time and 2 s for ranks to die are less than the 3 s that the supervisor waits after the grace period.
LIMIT_S: Final = 0.8
LOOK_S: Final = 0.05  # search again, because a process may start while others are killed
PAUSE_S: Final = 0.002
GONE: Final = "X"  # the state letter of a process that no longer exists (proc(5))


@dataclass(frozen=True)
class SweepResult:
    """The number of processes found, the pids of reaped children, and the pids of processes that did not die."""

    count: int
    buried: frozenset[int] = field(default_factory=frozenset)
    left: tuple[int, ...] = ()


def kill(pid: int) -> None:
    """Kill a process, if this user is permitted to."""
    with suppress(PermissionError):  # a program may have changed its user (sudo)
        linux.kill_quietly(pid, signal.SIGKILL)


def sweep(
    root: int, *, leave: Collection[int] = (), limit_s: float = LIMIT_S, kill: Callable[[int], None] = kill
) -> SweepResult:
    """Kill all descendants of this process (`root`), except `leave` and their descendants, within `limit_s`."""
    deadline = time.monotonic() + limit_s
    found: set[int] = set()
    buried: set[int] = set()
    while left := linux.descendants(root, leave=leave):
        found.update(left)
        for pid in left:
            kill(pid)
        now = time.monotonic()
        if now > deadline:
            return SweepResult(len(found), frozenset(buried), tuple(sorted(left)))
        wait_for_death(min(deadline, now + LOOK_S))
        buried |= bury()
    return SweepResult(len(found), frozenset(buried | bury()))  # include children that died since the last reaping


def wait_for_death(deadline: float) -> None:
    """Wait until a child of this process is dead, but do not reap it; stop at `deadline` (monotonic seconds)."""
    with suppress(ChildProcessError):  # no child now, but orphans may be adopted in a moment
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
    """Return the state letter of a process (proc(5)): R runs, S waits, D cannot be killed, T is stopped."""
    fields = procfs.stat(pid)
    return GONE if fields is None else fields[procfs.STATE].decode()


def described(pids: Collection[int]) -> list[dict[str, Any]]:
    """Describe processes: [{"pid", "state", "name"}, ...]."""
    return [{"pid": pid, "state": state_of(pid), "name": procfs.text_of(f"/proc/{pid}/comm") or "?"} for pid in pids]
