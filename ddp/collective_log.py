"""A log of this rank's collectives with launch and end times, for programs that record a timeline of a step.

    backward    h g | f e d | c b a |
    logged          [ h g   ]                 two collectives may be in progress at once
                          [ f e d  ]

There is one log per process, because collectives are launched in many places and by several threads. While the log is
off, a launch costs one comparison. The recording program chooses the marks: clock readings or CUDA events.

A ring or exchange has one entry, not one per message. Gathers and sums in shared memory send nothing. Their entries
show the time in which this rank waits for the data and reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

Mark = Callable[[], Any]


@dataclass
class Collective:
    """One collective on this rank. `bytes` is the size of the tensors passed to it; `end` is None while it runs."""

    operation: str
    bytes: int
    start: Any
    end: Any = None


class CollectiveLog:
    """The collectives that this process has launched since `begin`."""

    def __init__(self) -> None:
        self._mark: Mark | None = None
        self._collectives: list[Collective] = []
        self._beside: torch.cuda.Stream | None = None  # waits for NCCL, so the compute stream need not

    def begin(self, mark: Mark, device: torch.device) -> None:
        """Log collectives from now on. `mark` returns a time, or on CUDA an event recorded in the current stream."""
        self._mark, self._collectives = mark, []
        if device.type == "cuda" and self._beside is None:
            self._beside = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def end(self) -> list[Collective]:
        """Stop logging; return the collectives in the order of their launches."""
        self._mark, found, self._collectives = None, self._collectives, []
        return found

    def open(self, operation: str, size: int) -> Callable[[], None]:
        """Log the start of a collective. The caller must call the returned function when the collective ends."""
        mark = self._mark
        if mark is None:
            return _nothing
        found = Collective(operation, size, mark())
        self._collectives.append(found)

        def close() -> None:
            found.end = mark()

        return close

    def call_after(self, works: Sequence[dist.Work | None], finished: Callable[[], None]) -> None:
        """Call `finished` (from `open`) when all works have ended, on the backend's thread or, on CUDA, on a stream."""
        if finished is _nothing:
            return
        if self._beside is not None:
            with torch.cuda.stream(self._beside):
                for work in filter(None, works):
                    work.wait()
                finished()
            return
        for work in filter(None, works):
            work.get_future().add_done_callback(lambda _: finished())


def _nothing() -> None:
    pass


LOG: Final = CollectiveLog()
