"""What memory a rank needs: the peak of the process, and on a GPU the allocator's, with a snapshot of its history."""

import ctypes
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from muster.jobs.basics.files import write_bytes
from muster.jobs.trace.memory import HeldStorage
from muster.jobs.train.memory.gauge import overall
from muster.jobs.train.memory.held import Held, storages

MOST_EVENTS: Final = 1_000_000  # of the allocator, in a snapshot: the newest
ERROR: Final = 2  # of the levels of PyTorch's C++ log


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


def listed(held: Held) -> list[HeldStorage]:
    """List the storages of a training's state."""
    return [HeldStorage(kind, storage.data_ptr(), storage.nbytes()) for kind, storage in storages(held)]


class Quiet:
    """Keeps the CPU's allocator from warning that a tensor is freed that is older than the recording.

    It knows no switch of its own: the level of PyTorch's C++ log, which has no function in Python, is raised.
    """

    def __init__(self) -> None:
        self._level: ctypes.c_int | None = None

    def start(self) -> None:
        """Log errors only."""
        with suppress(OSError, ValueError):  # another build of PyTorch: it warns
            library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
            self._level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
            self._before = self._level.value
            self._level.value = max(self._before, ERROR)

    def stop(self) -> None:
        """Log as before; harmless if it was not started."""
        if self._level is not None:
            self._level.value, self._level = self._before, None
