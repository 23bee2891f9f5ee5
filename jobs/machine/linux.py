"""Linux calls that Python lacks: for process trees, disk space of files, and files in memory.

    prctl(2)          PR_SET_PDEATHSIG sends this process a signal when its parent dies. PR_SET_CHILD_SUBREAPER makes
                      orphaned descendants its children, so that none escapes by a double fork or setsid.
    fallocate(2)      allocates or frees blocks of a file
    memfd_create(2)   creates a file in memory

A Python built for an old C library, as conda's often is, lacks `memfd_create` and its constants.
"""

import ctypes
import fcntl
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from muster.jobs.machine import procfs

LIBC: Final = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
PUNCH_HOLE: Final = 1 | 2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE
MFD_CLOEXEC: Final = 1
MFD_ALLOW_SEALING: Final = 2
F_ADD_SEALS: Final = 1033
F_SEALS_OF_SIZE: Final = 1 | 2 | 4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
IN_OPEN: Final = 0x20
# The signals that ask a rank to save or stop. Launchers and schedulers send them to all of its processes, too.
ASKING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def signal_mask(how: int, signals: Iterable[int] = ASKING) -> Iterator[None]:
    """Block or unblock signals in this thread, by default `ASKING`. A process that it starts keeps this mask."""
    before = signal.pthread_sigmask(how, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when `parent` dies; exit if it is dead. `number` 0 cancels that."""
    checked(LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl: ")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    checked(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl: ")


def all_children() -> dict[int, list[int]]:
    """Return the children of every process on this machine, without zombies."""
    children: dict[int, list[int]] = {}
    for pid in procfs.pids():
        fields = procfs.stat(pid)
        if fields is not None and not procfs.is_dead(fields):
            children.setdefault(int(fields[procfs.PARENT]), []).append(pid)
    return children


def descendants(root: int, leave: Iterable[int] = (), children: Mapping[int, Sequence[int]] | None = None) -> list[int]:
    """List all descendants of `root`, parents before children, without zombies, `leave` and descendants of `leave`.

    `children` is the result of `all_children`, for callers that list the descendants of several processes.
    """
    children = all_children() if children is None else children
    found: list[int] = []
    skip = set(leave)
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in skip:
                found.append(child)
                queue.append(child)
    return found


def signal_name(number: int) -> str:
    """Return the name of a signal. Real-time signals are named relative to SIGRTMIN."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def signal_number(name: str) -> int:
    """Return the number of a signal from its `signal_name`."""
    base, _, offset = name.partition("+")
    return signal.Signals[base] + int(offset or 0)


def kill_quietly(pid: int, number: int, *, group: bool = False) -> None:
    """Send a signal to a process or its group; do nothing if the process is gone."""
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        return


def fallocate(descriptor: int, offset: int, length: int, mode: int = 0) -> None:
    """Allocate disk space for a part of a file, without the C library's fallback of writing to each block.

    With PUNCH_HOLE, free the space instead: the part then reads as zero bytes, and the file keeps its size.

    Raises:
        OSError: if the file system does not support the call, or is full.
    """
    checked(LIBC.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length)))


def memory_file(name: str, size: int | None = None) -> int:
    """Create a file in memory without a path; return its descriptor. If `size` is given, the size is fixed."""
    sealable = 0 if size is None else MFD_ALLOW_SEALING
    descriptor = checked(LIBC.memfd_create(name.encode(), MFD_CLOEXEC | sealable), "memfd_create: ")
    if size is not None:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, F_ADD_SEALS, F_SEALS_OF_SIZE)
    return descriptor


def openings(path: Path) -> int:
    """Return a descriptor that becomes readable when a process opens a file: inotify(7)."""
    watch = checked(LIBC.inotify_init1(os.O_CLOEXEC), "inotify_init1: ")
    checked(LIBC.inotify_add_watch(watch, os.fsencode(path), IN_OPEN), "inotify_add_watch: ")
    return watch


def checked(code: int, what: str = "") -> int:
    """Check the result of a C library call; return it.

    Raises:
        OSError: if the result is -1; the message begins with `what`.
    """
    if code == -1:
        number = ctypes.get_errno()
        raise OSError(number, what + os.strerror(number))
    return code


def signs_of_life(pid: int) -> tuple[bool, int]:
    """Return True if a process runs or waits for a disk, and the number of its context switches (proc(5), status)."""
    fields = dict(line.partition(":")[::2] for line in procfs.text_of(f"/proc/{pid}/status").splitlines())
    switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return fields.get("State", "").split()[:1] in (["R"], ["D"]), sum(int(fields.get(name, 0)) for name in switches)


def has_scheduler() -> bool:
    """Return True inside a Slurm job, where a scheduler may send SIGTERM to all processes at once."""
    return "SLURM_JOB_ID" in os.environ
