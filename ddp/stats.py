"""What a synchronization of gradients took."""

from dataclasses import dataclass
from time import perf_counter

import torch


@dataclass(frozen=True)
class Stats:
    """The last synchronization on this rank.

    `bytes` are those handed to the collectives (S, not what a ring sends of it); `exposed_wait_s` is how long the rank
    had nothing to do but to wait for them, after the last gradient was ready.
    """

    collectives: int = 0
    bytes: int = 0
    exposed_wait_s: float = 0.0


class Wait:
    """The time between two marks: of the host's clock, or of a CUDA stream without making the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        self._counts = device.type != "cuda" or self._on_stream  # a captured step has no marks of its own
        self._start = self._mark()
        self._end = self._start

    def stop(self) -> None:
        """Make the second mark."""
        self._end = self._mark()

    @property
    def seconds(self) -> float:
        """The time between; on CUDA this waits for the second mark."""
        if not self._counts:
            return 0.0
        if isinstance(self._start, float) or isinstance(self._end, float):
            assert isinstance(self._start, float)
            assert isinstance(self._end, float)
            return self._end - self._start
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def _mark(self) -> "float | torch.cuda.Event":
        if not self._on_stream:
            return perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
