"""What of this process is in RAM, by the kernel's accounts, in bytes; 0 where a kernel does not keep them.

    VmRSS    now: RssAnon, its own, with RssFile, pages of libraries, which come with their first use
    VmHWM    the most since the process began, or since `forget_peak`

The kernel counts in batches of pages for each core, so machines of many cores err by some MB.
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
    """Return some of the accounts by their names in /proc/self/status."""
    return _accounts(STATUS, names)


def own_share() -> int:
    """Return what this process has taken, in bytes: of a page that n processes have mapped, one n-th; no libraries.

    Ranks that read each other's memory have it in their VmRSS, each of them all that it has read.
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
    """Let the peak begin anew from what is resident now; False where the kernel cannot."""
    with suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK, encoding="ascii")
        return True
    return False


def give_back() -> None:
    """Have the allocator return what is free to the kernel, so that it no longer counts; where it can (glibc)."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
