"""What ranks of a pipeline say when one of them fails: everybody stops, and everybody names the first cause.

    rank 2   stage 2 raises ── writes why ── closes its connections ──────────── raises its own error
    rank 1   ... waits for rank 2: connection closed ── reads why ── closes its own ── StageFailedError: stage 2 ...
    rank 0   ... waits for rank 1: connection closed ── reads why ──────────────────── StageFailedError: stage 2 ...

A wait of gloo's ends when its connection does, so closing is what reaches a rank that waits; the reason stands in the
store of the group, where only the first who writes is heard. A process that dies closes its connections too: then it
is its neighbours that write.
"""

import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from muster.ddp.timeouts import STORE_S, ask_store

LISTEN_S: Final = 2.0  # how long a rank that lost another listens for the cause: who closes on purpose has written it
POLL_S: Final = 0.02
CAUSE: Final = "cause"


class StageFailedError(RuntimeError):
    """Another rank's stage failed, or its process is gone: the message names the first cause."""


class LostError(RuntimeError):
    """A message did not come or go: nobody's own mistake on this rank."""


class Board:
    """Where the ranks of a group write why they stop; the first one's reason is everybody's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def tell(self, cause: str) -> str:
        """Write a cause, unless there is one; return the one that stands."""
        return self._ask(lambda store: str(store.compare_set(CAUSE, "", cause).decode()), STORE_S) or cause

    def hear(self) -> str | None:
        """Return the cause that somebody wrote, listening for a moment; None if there is no word."""
        return self._ask(_listen, LISTEN_S + STORE_S)

    def _ask(self, question: Callable[[Store], str | None], limit_s: float) -> str | None:
        return ask_store(self._group, f"pipe/{self._group.group_name}", question, limit_s)


def _listen(store: Store) -> str | None:
    deadline = time.monotonic() + LISTEN_S
    while not store.check([CAUSE]):
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    cause: str = store.get(CAUSE).decode()
    return cause


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
