"""What ranks of a pipeline say when one of them fails: everybody stops, and everybody names the first cause.

    rank 2   stage 2 raises ── writes why ── closes its connections ──────────── raises its own error
    rank 1   ... waits for rank 2: connection closed ── reads why ── closes its own ── StageFailedError: stage 2 ...
    rank 0   ... waits for rank 1: connection closed ── reads why ──────────────────── StageFailedError: stage 2 ...

A wait of gloo's ends when its connection does, so closing is what reaches a rank that waits; the reason stands in the
store of the group, where only the first who writes is heard. A process that dies closes its connections too: then it
is its neighbours that write.
"""

import contextlib
import time
from collections.abc import Callable
from threading import Thread
from typing import Final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

LISTEN_S: Final = 2.0  # how long a rank that lost another listens for the cause: who closes on purpose has written it
STORE_S: Final = 2.0  # how much longer the store itself may take
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
        return self._ask(lambda store: store.compare_set(CAUSE, "", cause).decode(), STORE_S) or cause

    def hear(self) -> str | None:
        """Return the cause that somebody wrote, listening for a moment; None if there is no word."""
        return self._ask(_listen, LISTEN_S + STORE_S)

    def _ask(self, question: Callable[[Store], str | None], limit_s: float) -> str | None:
        """Ask the store on a thread of its own: where it went with its rank its time-outs are minutes."""
        answers: list[str | None] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                store = PrefixStore(f"pipe/{self._group.group_name}", self._group.get_group_store())
                answers.append(question(store))

        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(limit_s)
        return answers[0] if answers else None


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
