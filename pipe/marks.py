"""Marks in time that hold nothing up: where a device is, to be turned into seconds when somebody asks.

    marks = marks_for(device)
    before = marks.now();  ...;  after = marks.now()
    start_s, end_s = marks.seconds([before, after])               on the clock of time.monotonic()

A GPU does things later than it is told to: a mark there is an event on the current stream. To turn events into seconds,
one more is recorded and waited for, whose time the host knows; the GPU says how long before it each of the others was.
"""

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Mark: TypeAlias = Any  # seconds, or an event


class HostMarks:
    """A CPU is where its program is."""

    def now(self) -> Mark:
        """Mark this moment."""
        return time.monotonic()

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Return when the marks were made."""
        return list(marks)


class CudaMarks(HostMarks):
    """Events on whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Mark:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Wait until the device is past the marks; return when it was there."""
        last = self.now()
        torch.cuda.synchronize(self.device)
        last_s = time.monotonic()
        return [last_s - 1e-3 * each.elapsed_time(last) for each in marks]


def marks_for(device: torch.device) -> HostMarks:
    """Return the clock of a device."""
    return CudaMarks(device) if device.type == "cuda" else HostMarks()
