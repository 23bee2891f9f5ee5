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
    """A process, identified uniquely until the machine reboots."""

    pid: int
    start: int  # start time in clock ticks after the machine's boot

    @property
    def is_alive(self) -> bool:
        """True if the process exists, even if stopped; False for a zombie."""
        return procfs.start_ticks(self.pid) == self.start

    @property
    def is_stopped(self) -> bool:
        """True if the process exists and is stopped."""
        fields = procfs.stat(self.pid)
        return fields is not None and int(fields[procfs.START]) == self.start and fields[procfs.STATE] == b"T"


def read_identity(path: Path) -> Identity | None:
    """Read the identity that a node's first process wrote; None if it has not been written yet."""
    try:
        raw = read_json(path)
        return Identity(int(raw["pid"]), int(raw["start"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return None  # a full disk has truncated the file; the namespace still shows the node's processes


def kill(identities: Iterable[Identity]) -> None:
    """Kill processes and wait until they have ended.

    Raises:
        RefusedError: if a process does not end.
    """
    descriptors = []
    try:
        for each in identities:
            try:
                descriptor = os.pidfd_open(each.pid)
            except ProcessLookupError:
                continue
            descriptors.append(descriptor)
            if each.is_alive:  # checked after opening, because from then on the descriptor refers to this process only
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            else:
                os.close(descriptors.pop())
        _wait_gone(descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def in_network(namespace: Path) -> list[Identity]:
    """List the processes in a named network namespace."""
    try:
        wanted = namespace.stat().st_ino
    except FileNotFoundError:
        return []
    return [found for pid in procfs.pids() if _namespace(pid, "net") == wanted and (found := identity(pid))]


def beside(init: Identity) -> list[Identity]:
    """List all processes of the PID namespace of a node's first process, including that process."""
    wanted = _namespace(init.pid, "pid")
    if wanted is None or not init.is_alive:
        return []
    return [found for pid in procfs.pids() if _namespace(pid, "pid") == wanted and (found := identity(pid))]


def identity(pid: int) -> Identity | None:
    """Return the identity of a process; None if it does not exist."""
    start = procfs.start_ticks(pid)
    return None if start is None else Identity(pid, start)


def is_listening(pid: int, port: int) -> bool:
    """Return whether a process listens on a TCP port in the network of `pid`. No connection is made."""
    found = procfs.tcp(pid, ("tcp",))
    return any(state == procfs.LISTENING and local == port for local, _, state, _ in found)


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Wait for a condition; return whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def _wait_gone(descriptors: list[int]) -> None:
    """Wait until processes end. When a node's first process ends, all its other processes end, too."""
    deadline = time.monotonic() + KILL_S
    left = set(descriptors)
    poll = select.poll()
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    while left:
        remaining_ms = 1000 * (deadline - time.monotonic())
        if remaining_ms <= 0:
            raise RefusedError(f"{len(left)} killed processes still exist after {KILL_S:.0f} s; look for state D in ps")
        for descriptor, _ in poll.poll(remaining_ms):
            poll.unregister(descriptor)
            left.discard(descriptor)


def _namespace(pid: int, kind: str) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/{kind}").st_ino  # noqa: PTH116 (called for every process of the machine)
    except (
        FileNotFoundError,
        ProcessLookupError,
        PermissionError,
    ):  # the process is not a node's process if even root may not inspect it
        return None
