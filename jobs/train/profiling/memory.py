"""A rank's memory in a profile: the peak of the process, and on a GPU the allocator's peak and event history."""

import ctypes
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from muster.jobs.basics.files import write_inside
from muster.jobs.trace.memory import HeldStorage
from muster.jobs.train.memory.gauge import overall
from muster.jobs.train.memory.held import Held, storages

MOST_EVENTS: Final = 1_000_000  # most events in a snapshot; if there are more, the oldest are dropped
ERROR: Final = 2  # a level of PyTorch's C++ log


class AllocatorHistory:
    """The CUDA allocator's event history, with Python stacks, recorded from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_on = False

    def start(self) -> None:
        """Start recording."""
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=MOST_EVENTS, device=self.device
        )
        self.is_on = True

    def write(self, path: Path) -> None:
        """Write a snapshot that pytorch.org/memory_viz can show. Raises the same errors as `write_bytes`."""
        write_inside(path, pickle.dumps(torch.cuda.memory._snapshot(self.device)))

    def stop(self) -> None:
        """Stop recording. Does nothing if not started."""
        if self.is_on:
            torch.cuda.memory._record_memory_history(enabled=None, device=self.device)
            self.is_on = False


def peaks(device: torch.device) -> dict[str, int]:
    """Return the peak bytes since the process began: of host memory, and of the device's allocator."""
    names = {"rss": "host_peak_bytes", "allocated": "cuda_peak_bytes", "reserved": "cuda_reserved_peak_bytes"}
    return {names[name]: value for name, value in overall(device).items()}


def listed(held: Held) -> list[HeldStorage]:
    """List the storages of the given tensors, with their kinds."""
    return [HeldStorage(kind, storage.data_ptr(), storage.nbytes()) for kind, storage in storages(held)]


class QuietLog:
    """A filter for the warnings of the CPU allocator about freed tensors that are older than the recording.

    These warnings have no switch of their own, so the level of PyTorch's whole C++ log is raised. Python has no
    function for this.
    """

    def __init__(self) -> None:
        self._level: ctypes.c_int | None = None

    def start(self) -> None:
        """Log only errors."""
        with suppress(OSError, ValueError):  # a build of PyTorch without this flag keeps warning
            library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
            self._level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
            self._before = self._level.value
            self._level.value = max(self._before, ERROR)

    def stop(self) -> None:
        """Restore the log level. Does nothing if not started."""
        if self._level is not None:
            self._level.value, self._level = self._before, None
