"""Timestamps that do not block: marks on a CPU or GPU, which are converted to seconds later.

    marks = marks_for(device)
    before = marks.now();  ...;  after = marks.now()
    start_s, end_s = marks.seconds([before, after])               on the clock of time.monotonic()

A GPU runs asynchronously to its host, so its marks are events on the current stream. To convert them to seconds, the
host records one more event, waits for it, and reads its clock. CUDA measures the time between each mark and that event.
"""

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Mark: TypeAlias = Any  # seconds of the host's clock, or a CUDA event


class HostMarks:
    """Marks of a CPU: times of the host's clock."""

    def now(self) -> Mark:
        """Return a mark of the current time."""
        return time.monotonic()

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Return the time of each mark."""
        return list(marks)


class CudaMarks(HostMarks):
    """Marks of a GPU: events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Mark:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Wait until the device has passed the marks; return the time of each."""
        last = self.now()
        torch.cuda.synchronize(self.device)
        last_s = time.monotonic()
        return [last_s - 1e-3 * each.elapsed_time(last) for each in marks]


def marks_for(device: torch.device) -> HostMarks:
    """Return the marks for a device."""
    return CudaMarks(device) if device.type == "cuda" else HostMarks()
