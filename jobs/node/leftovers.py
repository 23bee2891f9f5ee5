"""What ranks leave behind: every process below their keeper, found through /proc and killed until none is left.

A process that the kernel does not let die - it waits for a disk or a device (state D), or is another user's - is told
instead of waited for.
"""

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from muster.jobs.machine import linux, procfs

LIMIT_S: Final = 0.8  # after 2 s for the ranks; the supervisor waits 3 s beyond the grace for the word that all is gone
LOOK_S: Final = 0.05  # a process may begin while others are being killed
PAUSE_S: Final = 0.002
GONE: Final = "X"  # the state of what has no state any more, see proc(5)


@dataclass(frozen=True)
class Swept:
    """How many processes there were, which children of ours were buried, and who would not die."""

    count: int
    buried: frozenset[int] = field(default_factory=frozenset)
    left: tuple[int, ...] = ()


def kill(pid: int) -> None:
    """Kill a process if we may."""
    with suppress(PermissionError):  # a program of the user's may have become somebody else (sudo)
        linux.kill_quietly(pid, signal.SIGKILL)


def sweep(
    root: int, *, leave: Collection[int] = (), limit_s: float = LIMIT_S, kill: Callable[[int], None] = kill
) -> Swept:
    """Kill every process below `root`, which is this one, sparing the trees of `leave`; take at most `limit_s`."""
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
    return Swept(len(found), frozenset(buried | bury()))  # who died after the last look, and is below nobody any more


def wait_for_death(deadline: float) -> None:
    """Wait until a child of this process is dead, without burying it; at most until `deadline` (monotonic seconds)."""
    with suppress(ChildProcessError):  # there is none: what was found is about to become ours
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)


def bury() -> set[int]:
    """Take the dead children of this process away; return which they were."""
    buried = set()
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            buried.add(pid)
    return buried


def state_of(pid: int) -> str:
    """Return the letter of a process's state, see proc(5): R runs, S waits, D cannot be killed, T stands still."""
    fields = procfs.stat(pid)
    return GONE if fields is None else fields[procfs.STATE].decode()


def described(pids: Collection[int]) -> list[dict[str, Any]]:
    """Say of processes what they are: [{"pid", "state", "name"}, ...]."""
    return [{"pid": pid, "state": state_of(pid), "name": procfs.text_of(f"/proc/{pid}/comm") or "?"} for pid in pids]
