"""The limit on open files: raised for a supervisor of many nodes, and as it was for what it starts."""

import resource
from contextlib import suppress
from typing import Final

ENOUGH: Final = 65_536
AT_START: Final = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_files() -> None:
    """Let this process open as many files as it may; each ssh costs it four."""
    soft, hard = AT_START
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def restore_open_files(pid: int) -> None:
    """Set a child back to the limit that we were started with: programs that use select(2) count on it."""
    with suppress(PermissionError, ProcessLookupError):  # a pdsh that is setuid, or that has ended already
        resource.prlimit(pid, resource.RLIMIT_NOFILE, AT_START)
