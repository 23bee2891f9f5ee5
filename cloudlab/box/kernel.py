"""The Linux calls setns, unshare and mount, which turn a process into a node.

Python 3.10 has no functions for these calls.
"""

import ctypes
import os
from pathlib import Path
from typing import Final

from muster.jobs.machine.linux import LIBC, checked

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_SLAVE: Final = 0x80000
SAFE: Final = MS_NOSUID | MS_NODEV | MS_NOEXEC


def enter_network(namespace: Path) -> None:
    """Move this process into a named network namespace."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        checked(LIBC.setns(descriptor, CLONE_NEWNET), f"setns {namespace}: ")
    finally:
        os.close(descriptor)


def leave(flags: int) -> None:
    """Move this process into new namespaces; a new PID namespace applies only to its children."""
    checked(LIBC.unshare(flags), f"unshare {flags:#x}: ")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Call mount(2)."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    code = LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    checked(code, f"mount {source} on {target}: ")
