"""The memory of this process that is in RAM, from the kernel's counters, in bytes; 0 if the kernel lacks a counter.

    VmRSS    now: RssAnon, its own, plus RssFile, pages of libraries, which are loaded on first use
    VmHWM    the maximum since the process started, or since `forget_peak`

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
RESET_PEAK: Final = "5"  # proc(5): the peak becomes what is resident now


def status(*names: str) -> list[int]:
    """Return counters by their names in /proc/self/status."""
    return _accounts(STATUS, names)


def own_share() -> int:
    """Return this process's own memory in bytes, without libraries. A page mapped by n processes counts 1/n.

    VmRSS would count all shared memory in full for each rank that has read it.
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
    """Reset the peak to what is resident now; return False if the kernel cannot."""
    with suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        return True
    return False


def give_back() -> None:
    """Have the allocator return free memory to the kernel, so that it no longer counts (glibc only)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
