"""The memory that a timed row needs, and the limit on it.

On a CPU a row is refused before its model is built if it needs more memory than is free. The row's process also has a
limit, so that it raises an error if it needs more than expected, and the kernel kills no process.
"""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch

from muster.jobs.machine import free, resident
from muster.jobs.models.anatomy import Anatomy
from muster.jobs.spec.train_fields import Precision
from muster.jobs.timing.settings import Pass

OOM_SCORE: Final = Path("/proc/self/oom_score_adj")
FIRST_TO_GO: Final = "1000"
GB: Final = 2**30

# Bytes per parameter, by pass: forward has the parameter, backward also its gradient, a step also AdamW's state.
STATES: Final[dict[Pass, int]] = {"forward": 4, "backward": 8, "step": 16}
PURE_STATES: Final[dict[Pass, int]] = {"forward": 2, "backward": 4, "step": 16}
ITEMSIZE: Final[dict[Precision, int]] = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2, "pure_bf16": 2}

# How torch, C++ and oneDNN report a lack of memory: not all raise torch.OutOfMemoryError.
SAID: Final = re.compile(r"out of memory|can't allocate memory|bad_alloc|could not create a memory|CUBLAS_STATUS_ALLOC")
TRIED: Final = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")


class Growth:
    """The peak growth of this process's or its GPU's memory since this object was created."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        (self._anonymous,) = resident.status("RssAnon")

    def forget_peak(self) -> None:
        """Exclude temporary memory used while the model was built; memory that is still held counts."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        resident.forget_peak()

    def peak_bytes(self) -> int:
        """Return the peak so far. Pages of libraries, which are loaded on first use, do not count."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak, files = resident.status("VmHWM", "RssFile")
        return max(0, peak - files - self._anonymous)


def refusal(
    model: Anatomy, batch: int, *, pass_name: Pass, precision: Precision, recompute: bool, allowed: int
) -> str | None:
    """Return why a row cannot fit in `allowed` bytes of a host, or None. Temporary memory is not counted."""
    states = (PURE_STATES if precision == "pure_bf16" else STATES)[pass_name] * model.elements
    if precision == "fp64":
        states *= 2
    kept = 0 if recompute else batch * model.saved_bytes(ITEMSIZE[precision])
    if states + kept <= allowed:
        return None
    held = {"forward": "weights", "backward": "weights and gradients", "step": "weights, gradients and moments"}
    return (
        f"needs {states / GB:.1f} GB for {held[pass_name]}"
        + (f" and {kept / GB:.1f} GB for activations" if kept else "")
        + f", but only {allowed / GB:.1f} GB may be used here; use a smaller batch or model"
    )


def allowed_bytes(share: float) -> int:
    """Return how much of this host's free memory a row may use."""
    return int(free.free_bytes() * share)


def shield(device: torch.device, allowed: int) -> None:
    """Limit this process's memory to protect the host, and make it the first process that the kernel kills."""
    with suppress(OSError):
        OOM_SCORE.write_text(FIRST_TO_GO, encoding="ascii")
    if device.type == "cpu":
        limit = resident.status("VmData")[0] + allowed
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


class OutOfMemory(Exception):
    """An error for a lack of memory, whose message has the requested amount."""


@contextmanager
def translating_errors(device: torch.device) -> Iterator[None]:
    """Convert every kind of out-of-memory error to OutOfMemory.

    Raises:
        OutOfMemory: if memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not SAID.search(str(error)):
            raise
        raise OutOfMemory(_reason(device, str(error))) from error


def _reason(device: torch.device, said: str) -> str:
    tried = TRIED.search(said)
    asked = f"asked for {_readable(tried[1])} more" if tried else "asked for more"
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        return f"{asked} with {held / GB:.1f} of this GPU's {total / GB:.1f} GB in use; use a smaller batch or model"
    return f"{asked} than may be used here; use a smaller batch or model"


def _readable(amount: str) -> str:
    """Format the CPU allocator's bytes in GB; CUDA's text has units already."""
    return f"{int(amount.split()[0]) / GB:.1f} GB" if amount.endswith("bytes") else amount
