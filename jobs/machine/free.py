"""The free memory, in bytes, of the host and of the control groups of this process."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from muster.jobs.machine.procfs import text_of

MEMORY_INFO: Final = Path("/proc/meminfo")
OWN_GROUPS: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")
# cgroup version 2, then 1: limit, usage, and the part of the usage that the kernel would reclaim first
FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> int:
    """Return the bytes that this process can still allocate: MemAvailable, or less in a limited control group."""
    return min([host_bytes("MemAvailable"), *(left for _, left in _groups())])


def all_bytes() -> int:
    """Return the memory for this process and its children: the host's total, or the lowest control group limit."""
    return min([host_bytes("MemTotal"), *(limit for limit, _ in _groups())])


def host_bytes(name: str) -> int:
    """Return an entry of /proc/meminfo in bytes; 0 if the entry does not exist."""
    match = re.search(rf"^{name}:\s*(\d+) kB", text_of(MEMORY_INFO), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _groups() -> Iterator[tuple[int, int]]:
    """Yield the limit and the remaining bytes of each memory control group that has a limit."""
    return filter(None, map(_limit_and_left, own_groups("memory")))


def _limit_and_left(folder: Path) -> tuple[int, int] | None:
    """Return the limit and the remaining bytes of one group.

    Inactive file pages count as free, because the kernel drops them before it refuses an allocation.
    """
    for limit_name, usage_name, cache_name in FILES:
        limit, usage = text_of(folder / limit_name), text_of(folder / usage_name)
        if limit.isdecimal() and usage.isdecimal():
            cache = re.search(rf"^{cache_name} (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE)
            return int(limit), max(0, int(limit) - int(usage) + (int(cache[1]) if cache else 0))
    return None


def own_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups and their parents. A container sees its group as the root."""
    for line in text_of(OWN_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root = GROUPS if (GROUPS / "cgroup.controllers").exists() else GROUPS / "unified"
        elif controller in controllers.split(","):
            root = GROUPS / controller
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        yield from (root / each for each in (own, *own.parents) if ".." not in each.parts)
