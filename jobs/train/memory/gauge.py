"""How much memory this process has taken, of the host and of its GPU: now, the peak since a point, and the peak of all.

The kernel and the allocator have one peak each, for whoever asks. `since` sets them back; what they were stays known
here, so that nobody who asks for the peak of all is told less.

What the kernel counts has holes in it: blocks that were freed, and lie between others that were not. `in_use` tells
what the heap has handed out; it has no peak, and walks the heap, so it is asked now and then.
"""

import ctypes
from typing import Final

import torch

from muster.jobs.machine import resident

_BEFORE: Final[dict[str, int]] = {}  # the peaks that were set back: of this process, as the counters are
_COUNTS: Final = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")


class _Heap(ctypes.Structure):
    """What glibc's `mallinfo2` returns (malloc.h)."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*_COUNTS, "keepcost"))


def in_use() -> int | None:
    """Return the bytes that the heap has handed out, with memory that is shared with other ranks; None without glibc.

    Mapped blocks count, too. It takes a tenth of a millisecond to some milliseconds.
    """
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)  # from glibc 2.33 on
    if ask is None:
        return None
    ask.restype = _Heap
    heap = ask()
    return int(heap.uordblks + heap.hblkhd + resident.status("RssShmem")[0])


def now(device: torch.device) -> dict[str, int]:
    """Return what is taken: {"rss", "files"}, and on a GPU {"allocated", "reserved"}; bytes."""
    rss, files = resident.status("VmRSS", "RssFile")
    found = {"rss": rss, "files": files}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.memory_allocated(device)
        found["reserved"] = torch.cuda.memory_reserved(device)
    return found


def since(device: torch.device) -> dict[str, int]:
    """Return the peaks since this was last called, or since the process began, and begin anew."""
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
        # The allocator of a rank that is alone has not been asked for anything yet.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        found["allocated"] = torch.cuda.max_memory_allocated(device)
        found["reserved"] = torch.cuda.max_memory_reserved(device)
    return found
