"""The limit on open files: raised for a supervisor of many nodes, and restored for its child processes."""

import resource
from contextlib import suppress
from typing import Final

ENOUGH: Final = 65_536
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
