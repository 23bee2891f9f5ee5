"""What memory a rank needs: the peak of the process, and on a GPU the allocator's, with a snapshot of its history."""

import pickle
from pathlib import Path
from typing import Final

import torch

from muster.jobs.basics.files import write_bytes
from muster.jobs.train.memory.gauge import overall

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
    names = {"rss": "host_peak_bytes", "allocated": "cuda_peak_bytes", "reserved": "cuda_reserved_peak_bytes"}
    return {names[name]: value for name, value in overall(device).items()}
