"""The utilization of this node's GPUs and their memory in use, from the driver's library (NVML).

Nothing is reported if the driver, and with it the library, is missing. The values include programs of all users.
"""

import ctypes
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

LIBRARY: Final = "libnvidia-ml.so.1"
LOOK_S: Final = 1.0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))  # bytes


class Gpus:
    """Access to the GPUs of a node by their names in CUDA_VISIBLE_DEVICES (numbers or UUIDs)."""

    def __init__(self) -> None:
        self.nvml: ctypes.CDLL | None = None
        with suppress(OSError, AttributeError):  # the library is missing, or lacks these functions
            library = ctypes.CDLL(LIBRARY)
            self.nvml = None if library.nvmlInit_v2() else library

    def look(self, name: str) -> tuple[int, int] | None:
        """Return a GPU's utilization in percent and its memory in use in bytes; None if unknown."""
        nvml, device, busy, memory = self.nvml, ctypes.c_void_p(), _Utilization(), _Memory()
        if nvml is None:
            return None
        if name.isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(device))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
        failed = failed or nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(busy))
        failed = failed or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        return None if failed else (int(busy.gpu), int(memory.used))


class GpuWatch:
    """A daemon thread that polls each rank's GPU every second. With a broken driver, a query may never return.

    `names`: the GPU of each rank. `seen`: the last result of `Gpus.look`, by rank.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.seen: dict[int, tuple[int, int]] = {}
        self._names = names
        self._over = threading.Event()
        if names:
            threading.Thread(target=self._watch, name="gpus", daemon=True).start()

    def _watch(self) -> None:
        gpus = Gpus()
        while gpus.nvml is not None and not self._over.wait(LOOK_S):
            for rank, name in self._names.items():
                if (found := gpus.look(name)) is not None:
                    self.seen[rank] = found

    def close(self) -> None:
        """Stop polling."""
        self._over.set()
