"""Measure the memory of this process on the host and its GPU: now, the peak since a point, and the overall peak.

The kernel and the allocator have one peak counter each. `since` resets them; earlier peaks are kept here, so that the
overall peak stays correct.

The kernel's numbers include free blocks of the heap. `in_use` counts only allocated blocks. It has no peak counter and
walks the heap, so it is called rarely.
"""

import ctypes
from typing import Final

import torch

from muster.jobs.machine import resident

_BEFORE: Final[dict[str, int]] = {}  # {counter: its peak before it was reset}; global, because the counters are global
_COUNTS: Final = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")


class _Heap(ctypes.Structure):
    """The result of glibc's `mallinfo2` (malloc.h)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*_COUNTS, "keepcost"))


def in_use() -> int | None:
    """Return the bytes allocated on the heap, including mapped blocks, plus resident shared memory; None without glibc.

    The call takes from 0.1 ms to a few milliseconds.
    """
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc has it since version 2.33
    if ask is None:
        return None
    ask.restype = _Heap
    heap = ask()
    return int(heap.uordblks + heap.hblkhd + resident.status("RssShmem")[0])


def now(device: torch.device) -> dict[str, int]:
    """Return the memory in use, in bytes: {"rss", "files"}, and on a GPU also {"allocated", "reserved"}."""
    rss, files = resident.status("VmRSS", "RssFile")
    found = {"rss": rss, "files": files}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.memory_allocated(device)
        found["reserved"] = torch.cuda.memory_reserved(device)
    return found


def since(device: torch.device) -> dict[str, int]:
    """Return the peaks since the last call, or since the process began, and reset them."""
    found = _peaks(device)
    for name, value in found.items():
        _BEFORE[name] = max(value, _BEFORE.get(name, 0))
    resident.forget_peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return found


def overall(device: torch.device) -> dict[str, int]:
    """Return the peaks since the process began."""
    return {name: max(value, _BEFORE.get(name, 0)) for name, value in _peaks(device).items()}


def _peaks(device: torch.device) -> dict[str, int]:
    found = {"rss": resident.status("VmHWM")[0]}
    if device.type == "cuda":
        # On a single rank, nothing may have initialized the allocator yet.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found["allocated"] = torch.cuda.max_memory_allocated(device)
        found["reserved"] = torch.cuda.max_memory_reserved(device)
    return found
