"""The clock of a device: nothing is over until the device says so."""

from collections.abc import Callable
from time import perf_counter

import torch


def claim(device: torch.device) -> None:
    """Make a GPU this process's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that work takes, until the device is done with it."""
    began = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - began
