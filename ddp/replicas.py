"""Data parallelism within one process: a copy of a module on every device, and a thread that runs it.

    first device    parameters and buffers ──copy──> devices 1, 2, ...              replicate
    every device    forward and backward on its part of the batch                   run
    first device    gradients, added in the order of devices <──copy── 1, 2, ...    reduce

This is how torch.nn.DataParallel works. The first device sends and receives every copy and has the only optimizer, and
one Python interpreter starts the work of all devices. Separate processes that all-reduce their gradients avoid both
limits.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class Replicas:
    """A module on the first of several devices, and its copies on the other devices. A device may occur more than once.

    Modules on one device share its random generator, so a forward that draws random numbers is not reproducible.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        """Copy the module, which must be on the first device, to every other device.

        Raises:
            ValueError: if there is no device, or the module is not on the first device.
        """
        if not devices:
            raise ValueError("Replicas needs at least one device, got none")
        if wrong := {str(each.device) for each in _tensors(module) if each.device != devices[0]}:
            raise ValueError(f"the module must be on the first device, {devices[0]}, but has tensors on {min(wrong)}")
        self.devices = tuple(devices)
        self.modules = [module, *(deepcopy(module).to(device) for device in devices[1:])]
        for copied in self.modules[1:]:
            copied.zero_grad(set_to_none=True)
        self._threads = ThreadPoolExecutor(len(devices), thread_name_prefix="replica")

    @torch.no_grad()
    def replicate(self) -> None:
        """Copy the first module's parameters and buffers to the other modules."""
        for copied in self.modules[1:]:
            for mine, source in zip(_tensors(copied), _tensors(self.modules[0]), strict=True):
                mine.copy_(source, non_blocking=True)

    def run(self, work: Callable[[int, nn.Module], T]) -> list[T]:
        """Call `work(index, module)` for every module, each in its own thread; return the results in order.

        If calls fail, the error of the first failed module is raised after all calls have ended.
        """
        calls = [self._threads.submit(self._call, work, index) for index in range(len(self.modules))]
        wait(calls)
        return [each.result() for each in calls]

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace the first device's gradients by their mean over all devices, added in the order of devices."""
        for first, *others in zip(*(module.parameters() for module in self.modules), strict=True):
            for other in others:
                if other.grad is None:
                    continue
                moved, other.grad = other.grad.to(first.device), None
                first.grad = moved if first.grad is None else first.grad.add_(moved)
            if first.grad is not None and others:
                first.grad.div_(len(self.modules))

    def _call(self, work: Callable[[int, nn.Module], T], index: int) -> T:
        if self.devices[index].type == "cuda":
            torch.cuda.set_device(self.devices[index])
        # All threads share autocast's cache of casts. The first forward to end would clear the cache while other
        # forwards still run.
        torch.set_autocast_cache_enabled(False)
        return work(index, self.modules[index])


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
