"""Limits of a process that serves or reads a large run: its open files, and its garbage collections."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

ENOUGH: Final = 65_536
GC_AFTER: Final = 50_000  # new objects
AT_START: Final = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_files() -> None:
    """Raise this process's limit on open files to the maximum, because each ssh needs four descriptors."""
    soft, hard = AT_START
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def restore_open_files(pid: int) -> None:
    """Reset a child's limit to the value that this process started with: select(2) needs a low limit."""
    with suppress(PermissionError, ProcessLookupError):  # the child is a setuid pdsh, or has already ended
        resource.prlimit(pid, resource.RLIMIT_NOFILE, AT_START)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect garbage rarely within the block: the records of a large run live long, so scanning them is in vain."""
    before = gc.get_threshold()
    gc.set_threshold(GC_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
