"""How much memory this process has taken, of the host and of its GPU: now, the peak since a point, and the peak of all.

The kernel and the allocator have one peak each, for whoever asks. `since` sets them back; what they were stays known
here, so that nobody who asks for the peak of all is told less.
"""

from typing import Final

import torch

from jobs import resident

_BEFORE: Final[dict[str, int]] = {}  # the peaks that were set back: of this process, as the counters are


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
