"""Statistics of a gradient synchronization."""

from dataclasses import dataclass
from time import perf_counter

import torch


@dataclass(frozen=True)
class Stats:
    """Statistics of the last synchronization on this rank.

    `bytes` is the size of the tensors passed to collectives (S in cost formulas), not the number of bytes that a ring
    sends. `exposed_wait_s` is the time that the rank spent waiting for collectives after its last gradient was ready.
    """

    collectives: int = 0
    bytes: int = 0
    exposed_wait_s: float = 0.0


class Wait:
    """A stopwatch, on the host's clock or, without blocking the host, on a CUDA stream.

    The stopwatch starts when it is created.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        self._counts = device.type != "cuda" or self._on_stream  # events captured in a CUDA graph measure no time
        self._start = self._mark()
        self._end = self._start

    def stop(self) -> None:
        """Record the end of the measured time."""
        self._end = self._mark()

    @property
    def seconds(self) -> float:
        """Seconds from the start to `stop`. On CUDA this waits until the stream has reached `stop`."""
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
