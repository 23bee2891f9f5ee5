"""The limit on open files: raised for a supervisor of many nodes, and restored for its child processes."""

import resource
from contextlib import suppress
from typing import Final

ENOUGH: Final = 65_536
AT_START: Final = resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_files() -> None:
    """Raise this process's limit on open files as far as allowed; each ssh needs four descriptors."""
    soft, hard = AT_START
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def restore_open_files(pid: int) -> None:
    """Restore a child's limit to the value at our start, because programs that use select(2) need a low one."""
    with suppress(PermissionError, ProcessLookupError):  # a pdsh that is setuid, or has already ended
        resource.prlimit(pid, resource.RLIMIT_NOFILE, AT_START)
