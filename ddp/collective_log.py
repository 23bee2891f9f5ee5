"""When collectives run, for somebody who records a step: each from its launch to its end.

    backward    h g | f e d | c b a |
    logged          [ h g   ]                 two collectives may be under way at once
                          [ f e d  ]

The process has one log, as it has one profiler: collectives are launched in many places, and by threads too. While it
is off, a launch pays one comparison. Marks are what the recording program uses: readings of a clock, or CUDA events.

Rings and exchanges are one entry each, not one for every message. What ranks of one host read out of each other's
memory is logged while it is read, for nothing travels before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

Mark = Callable[[], Any]


@dataclass
class Collective:
    """One collective on this rank; `bytes` are those handed to it, `end` is None until it has finished."""

    operation: str
    bytes: int
    start: Any
    end: Any = None


class CollectiveLog:
    """The collectives that this process has launched since `begin`."""

    def __init__(self) -> None:
        self._mark: Mark | None = None
        self._collectives: list[Collective] = []
        self._beside: torch.cuda.Stream | None = None  # waits for NCCL in place of the computing stream

    def begin(self, mark: Mark, device: torch.device) -> None:
        """Log what is launched from now on; on CUDA a mark is an event in the current stream."""
        self._mark, self._collectives = mark, []
        if device.type == "cuda" and self._beside is None:
            self._beside = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]

    def end(self) -> list[Collective]:
        """Log nothing more; return what was launched, in order."""
        self._mark, found, self._collectives = None, self._collectives, []
        return found

    def open(self, operation: str, size: int) -> Callable[[], None]:
        """Log a collective that begins here; call the returned function when it has finished."""
        mark = self._mark
        if mark is None:
            return _nothing
        found = Collective(operation, size, mark())
        self._collectives.append(found)

        def close() -> None:
            found.end = mark()

        return close

    def call_after(self, works: Sequence[dist.Work | None], finished: Callable[[], None]) -> None:
        """Call what `open` returned when works have finished; on CPUs the backend's thread does, on CUDA a stream."""
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
