"""How much memory is free: of the host, and within the control groups that this process is in. Bytes."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

MEMORY_INFO: Final = Path("/proc/meminfo")
OWN_GROUPS: Final = Path("/proc/self/cgroup")
GROUPS: Final = Path("/sys/fs/cgroup")
# version 2, and version 1: limit, usage, and what of the usage the kernel would drop first
FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> int:
    """Return what processes of ours may still take: MemAvailable, or less where a control group is nearer its limit."""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(MEMORY_INFO), re.MULTILINE)
    host = int(match[1]) * 1024 if match else 0
    return min([host, *(left for folder in _own_folders() if (left := group_left(folder)) is not None)])


def group_left(folder: Path) -> int | None:
    """Return what is left below the limit of a control group; None where it has none.

    Files that nobody has touched lately count as left: the kernel drops them before it refuses memory.
    """
    for limit_name, usage_name, cache_name in FILES:
        limit, usage = _text(folder / limit_name), _text(folder / usage_name)
        if limit.isdecimal() and usage.isdecimal():
            cache = re.search(rf"^{cache_name} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            return max(0, int(limit) - int(usage) + (int(cache[1]) if cache else 0))
    return None


def _own_folders() -> Iterator[Path]:
    """List the folders of our memory groups up to the root; a container shows its own group as that root."""
    for line in _text(OWN_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root = GROUPS if (GROUPS / "cgroup.controllers").exists() else GROUPS / "unified"
        elif "memory" in controllers.split(","):
            root = GROUPS / "memory"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        yield from (root / each for each in (own, *own.parents) if ".." not in each.parts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # not there, or not for us
        return ""
