"""Processes of a node, seen from the host: identified by pid and start time, or by namespace, but never by name."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.reading import read_json
from muster.jobs.machine import procfs

KILL_S: Final = 20.0
POLL_S: Final = 0.01


@dataclass(frozen=True)
class Identity:
    """One process, for as long as this machine runs."""

    pid: int
    start: int  # clock ticks after the machine's own start

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is stopped; a zombie does not."""
        return procfs.start_ticks(self.pid) == self.start

    @property
    def is_stopped(self) -> bool:
        """Whether it is there and stopped."""
        fields = procfs.stat(self.pid)
        return fields is not None and int(fields[procfs.START]) == self.start and fields[procfs.STATE] == b"T"


def read_identity(path: Path) -> Identity | None:
    """Read what the first process of a node wrote about itself; None when it wrote nothing yet."""
    try:
        raw = read_json(path)
        return Identity(int(raw["pid"]), int(raw["start"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return None  # cut off by a full disk; the namespace still says which processes are the node's


def kill(identities: Iterable[Identity]) -> None:
    """Kill processes and wait until they are gone.

    Raises:
        RefusedError: one does not go.
    """
    descriptors = []
    try:
        for each in identities:
            try:
                descriptor = os.pidfd_open(each.pid)
            except ProcessLookupError:
                continue
            descriptors.append(descriptor)
            if each.is_alive:  # looked at after the descriptor was opened: it cannot become another process any more
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            else:
                os.close(descriptors.pop())
        _wait_gone(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def in_network(namespace: Path) -> list[Identity]:
    """List the processes in a network namespace that has a name."""
    try:
        wanted = namespace.stat().st_ino
    except FileNotFoundError:
        return []
    return [found for pid in procfs.pids() if _namespace(pid, "net") == wanted and (found := identity(pid))]


def beside(init: Identity) -> list[Identity]:
    """List all processes of the PID namespace of a node's first process, itself included."""
    wanted = _namespace(init.pid, "pid")
    if wanted is None or not init.is_alive:
        return []
    return [found for pid in procfs.pids() if _namespace(pid, "pid") == wanted and (found := identity(pid))]


def identity(pid: int) -> Identity | None:
    """Return the identity of a process that is there now."""
    start = procfs.start_ticks(pid)
    return None if start is None else Identity(pid, start)


def is_listening(pid: int, port: int) -> bool:
    """Say whether somebody listens on a TCP port in the network of a process; nobody there notices the question."""
    found = procfs.tcp(pid, ("tcp",))
    return any(state == procfs.LISTENING and local == port for local, _, state, _ in found)


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Wait for a condition; say whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def _wait_gone(descriptors: list[int]) -> None:
    """Wait for the end of processes; of a node's first one, that is the end of all its others."""
    deadline = time.monotonic() + KILL_S
    left = set(descriptors)
    poll = select.poll()
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    while left:
        remaining_ms = 1000 * (deadline - time.monotonic())
        if remaining_ms <= 0:
            raise RefusedError(f"{len(left)} killed processes are still there after {KILL_S:.0f} s; see ps for state D")
        for descriptor, _ in poll.poll(remaining_ms):
            poll.unregister(descriptor)
            left.discard(descriptor)


def _namespace(pid: int, kind: str) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino  # noqa: PTH116 (called for every process of the machine)
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # one that even root may not look into is not ours
        return None
