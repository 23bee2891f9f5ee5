"""Count the bytes of this process's memory that are in RAM. A counter that the kernel lacks is 0.

    VmRSS    the current value: RssAnon (its own pages) plus RssFile (pages of libraries, loaded on first use)
    VmHWM    the peak of VmRSS since the process started, or since `forget_peak`

The kernel counts in batches of pages per core, so on machines with many cores the error is some MB.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

STATUS: Final = Path("/proc/self/status")
ROLLUP: Final = Path("/proc/self/smaps_rollup")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")
RESET_PEAK: Final = "5"  # proc(5): sets the peak to the current value


def status(*names: str) -> list[int]:
    """Return the named counters of /proc/self/status."""
    return _accounts(STATUS, names)


def own_share() -> int:
    """Return this process's own memory in bytes, without libraries. A page mapped by n processes counts 1/n.

    VmRSS would count shared memory in full in each rank that has read it.
    """
    return sum(_accounts(ROLLUP, ("Pss_Anon", "Pss_Shmem")))


def _accounts(path: Path, names: Sequence[str]) -> list[int]:
    found = dict.fromkeys(names, 0)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) * 1024
    return list(found.values())


def forget_peak() -> bool:
    """Reset the peak to the current value; return False if the kernel does not support that."""
    with suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        return True
    return False


def give_back() -> None:
    """Make the allocator return free memory to the kernel, so that it is no longer resident (glibc only)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
