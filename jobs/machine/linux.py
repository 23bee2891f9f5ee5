"""Linux calls which Python does not offer: for trees of processes, the disk space of files, files in memory.

`prctl(2)`: PR_SET_PDEATHSIG sends this process a signal when its parent dies; PR_SET_CHILD_SUBREAPER makes orphans
of this process's descendants its own children, so that nothing escapes by double fork or setsid.
`fallocate(2)`: claims blocks of a file, or gives them back.
`memfd_create(2)`: a Python that was built for an old C library, as conda's often are, lacks it and its constants.
"""

import ctypes
import fcntl
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
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


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process when `parent`, which forked it, dies or has died; `number` 0 undoes it."""
    checked(LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl: ")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans."""
    checked(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl: ")


def all_children() -> dict[int, list[int]]:
    """Return the children of every process of this machine, without zombies."""
    children: dict[int, list[int]] = {}
    for pid in procfs.pids():
        fields = procfs.stat(pid)
        if fields is not None and not procfs.is_dead(fields):
            children.setdefault(int(fields[procfs.PARENT]), []).append(pid)
    return children


def descendants(root: int, leave: Iterable[int] = (), children: Mapping[int, Sequence[int]] | None = None) -> list[int]:
    """List all processes below `root`, children before their own, without the trees of `leave`. Zombies count not.

    `children` are those of `all_children`, for a caller that asks for several processes at once.
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
    """Name a signal; the real-time ones between the first and the last have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def signal_number(name: str) -> int:
    """Return the number of a signal that `signal_name` named."""
    base, _, offset = name.partition("+")
    return signal.Signals[base] + int(offset or 0)


def kill_quietly(pid: int, number: int, *, group: bool = False) -> None:
    """Signal a process or its group; one that is gone already is what was wanted."""
    try:
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        return


def fallocate(descriptor: int, offset: int, length: int, mode: int = 0) -> None:
    """Claim disk space for a part of a file, by the kernel's own call: the C library's writes to each block instead.

    With PUNCH_HOLE give it back: the part then reads as zero bytes, and the file keeps its size.

    Raises:
        OSError: the file system cannot, or is full.
    """
    checked(LIBC.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(length)))


def memory_file(name: str, size: int | None = None) -> int:
    """Make a file without a path, in memory; return its descriptor. With a `size`, nobody can change that."""
    sealable = 0 if size is None else MFD_ALLOW_SEALING
    descriptor = checked(LIBC.memfd_create(name.encode(), MFD_CLOEXEC | sealable), "memfd_create: ")
    if size is not None:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, F_ADD_SEALS, F_SEALS_OF_SIZE)
    return descriptor


def checked(code: int, what: str = "") -> int:
    """Return what a call of the C library returned.

    Raises:
        OSError: it returned -1; `what` is put before the reason.
    """
    if code == -1:
        number = ctypes.get_errno()
        raise OSError(number, what + os.strerror(number))
    return code


def signs_of_life(pid: int) -> tuple[bool, int]:
    """Say whether a process waits for a processor or a disk, and how often it has been scheduled (proc(5), status)."""
    fields = dict(line.partition(":")[::2] for line in procfs.text_of(f"/proc/{pid}/status").splitlines())
    switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return fields.get("State", "").split()[:1] in (["R"], ["D"]), sum(int(fields.get(name, 0)) for name in switches)


def has_scheduler() -> bool:
    """Say whether a scheduler may send SIGTERM to every process of ours at once, to be answered in order."""
    return "SLURM_JOB_ID" in os.environ
