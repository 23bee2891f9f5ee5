"""What memory a rank needs: the peak of the process, and on a GPU the allocator's, with a snapshot of its history."""

import pickle
from pathlib import Path
from typing import Final

import torch

from jobs.files import write_bytes

MOST_EVENTS: Final = 1_000_000  # of the allocator, in a snapshot: the newest


class History:
    """Has the CUDA allocator keep what it does, with Python's stacks, until the snapshot is taken."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False

    def start(self) -> None:
        """Begin."""
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=MOST_EVENTS, device=self.device
        )
        self.is_on = True

    def write(self, path: Path) -> None:
        """Write the snapshot, which pytorch.org/memory_viz shows; errors as `write_bytes`."""
        write_bytes(path, pickle.dumps(torch.cuda.memory._snapshot(self.device)))

    def stop(self) -> None:
        """End, if it has begun; harmless otherwise."""
        if self.is_on:
            torch.cuda.memory._record_memory_history(enabled=None, device=self.device)
            self.is_on = False


def peaks(device: torch.device) -> dict[str, int]:
    """Return the peaks since the process began, in bytes: of the host's memory, and of the device's allocator."""
    found = {"host_peak_bytes": host_peak_bytes()}
    if device.type == "cuda":
        found["cuda_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        found["cuda_reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


def host_peak_bytes() -> int:
    """Return the most memory that this process has had in RAM at once."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise AssertionError("/proc/self/status has no VmHWM")
