"""Read information about processes from /proc (proc(5)). A process that is gone or unreadable yields nothing.

Agents import this module before they greet the supervisor, so it imports only `os`.
"""

import os
from collections.abc import Iterator

STATE, PARENT, THREADS, START = 0, 1, 17, 19  # indices into the result of `stat`
LISTENING, ESTABLISHED = "0A", "01"  # states that `tcp` yields
DEAD = (b"Z", b"X")


def text_of(path: object) -> str:
    """Return the stripped text of a kernel file; "" if it cannot be read."""
    try:
        with open(str(path), encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:  # missing, or not permitted
        return ""


def stat(pid: int | str) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat after the program name; `pid` may be "self"."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b")")[2].split()  # the name may contain any bytes
    except OSError:
        return None


def is_dead(fields: list[bytes]) -> bool:
    """Return True for a zombie, given the result of `stat`. A process is alive while any of its threads is."""
    return fields[STATE] in DEAD and int(fields[THREADS]) <= 1


def start_ticks(pid: int | str) -> int | None:
    """Return when a process started, in clock ticks after boot; None if it is gone or a zombie.

    The kernel reuses pids, so a process is identified by (pid, start), never by a pid alone.
    """
    fields = stat(pid)
    return None if fields is None or is_dead(fields) else int(fields[START])


def pids() -> Iterator[int]:
    """Yield the pids of all processes on this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208


def tcp(pid: int | str = "self", tables: tuple[str, ...] = ("tcp", "tcp6")) -> Iterator[tuple[int, int, str, str]]:
    """Yield (local port, remote port, state, inode) of the TCP sockets in a process's network namespace."""
    for table in tables:
        for line in text_of(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = line.split()
            local, remote = (int(fields[place].rpartition(":")[2], 16) for place in (1, 2))
            yield local, remote, fields[3], fields[9]


def boot_id() -> str:
    """Return the id of the machine's current boot."""
    return text_of("/proc/sys/kernel/random/boot_id")
