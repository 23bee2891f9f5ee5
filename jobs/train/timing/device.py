"""Time work on a device until the device has finished, and measure its speed of matrix products."""

from collections.abc import Callable
from time import perf_counter
from typing import Final

import torch

from muster.jobs.spec.train_fields import Precision
from muster.jobs.train.numerics.numerics import ROWS

CPU_SIDES: Final = (256, 512, 1024, 2048)
CUDA_SIDE: Final = 8192
ENOUGH_S: Final = 0.05  # time of one product on a CPU; larger products would not have a higher rate
TRIES: Final = 6


def claim(device: torch.device) -> None:
    """Select a GPU for this process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes, until the device has finished it."""
    began = perf_counter()
    work()
    synchronize(device)
    return perf_counter() - began


def product_rate(precision: Precision, device: torch.device) -> tuple[int, float]:
    """Return the side of the matrices, and the best rate of several products in FLOP/s."""
    row = ROWS[precision]
    dtype = row.autocast or row.weights
    side, seconds = CUDA_SIDE, float("inf")
    if device.type == "cpu":
        for side in CPU_SIDES:
            seconds = _best(side, dtype, device, tries=2)
            if seconds >= ENOUGH_S:
                break
    return side, 2 * side**3 / min(seconds, _best(side, dtype, device))


def _best(side: int, dtype: torch.dtype, device: torch.device, *, tries: int = TRIES) -> float:
    """Return the seconds of the fastest product, after a warm-up product."""
    one = torch.randn(side, side, device=device).to(dtype)
    other = torch.randn(side, side, device=device).to(dtype)
    out = torch.mm(one, other)
    synchronize(device)
    return min(timed(lambda: torch.mm(one, other, out=out), device) for _ in range(tries))
