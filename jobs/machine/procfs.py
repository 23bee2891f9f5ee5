"""What /proc says of processes (proc(5)). Of one that is gone, or is not ours to read, there is nothing.

Agents import this before they greet: nothing but `os`.
"""

import os
from collections.abc import Iterator

STATE, PARENT, THREADS, START = 0, 1, 17, 19  # places in what `stat` returns
LISTENING, ESTABLISHED = "0A", "01"  # states of `tcp`
DEAD = (b"Z", b"X")


def text_of(path: object) -> str:
    """Return the text of a file of the kernel's, without the white space around it; "" where it cannot be read."""
    try:
        with open(str(path), encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:  # not there, or not for us
        return ""


def stat(pid: int | str) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat behind the program's name; `pid` may be "self"."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return file.read().rpartition(b")")[2].split()  # a name may be any bytes
    except OSError:
        return None


def is_dead(fields: list[bytes]) -> bool:
    """Say of what `stat` returned whether it is a zombie's; a main thread may end before the others, which live on."""
    return fields[STATE] in DEAD and int(fields[THREADS]) <= 1


def start_ticks(pid: int | str) -> int | None:
    """Return when a process began, in clock ticks after boot; None when it is gone or a zombie.

    The kernel uses a pid again, so a process is (pid, start) and never a pid alone.
    """
    fields = stat(pid)
    return None if fields is None or is_dead(fields) else int(fields[START])


def pids() -> Iterator[int]:
    """Yield all processes of this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208


def tcp(pid: int | str = "self", tables: tuple[str, ...] = ("tcp", "tcp6")) -> Iterator[tuple[int, int, str, str]]:
    """Yield (local port, remote port, state, inode) of the TCP sockets in the network of a process."""
    for table in tables:
        for line in text_of(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = line.split()
            local, remote = (int(fields[place].rpartition(":")[2], 16) for place in (1, 2))
            yield local, remote, fields[3], fields[9]


def boot_id() -> str:
    """Return what this start of the machine is called."""
    return text_of("/proc/sys/kernel/random/boot_id")
