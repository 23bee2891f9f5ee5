"""Report a failed stage to all ranks of a pipeline: every rank stops and reports the same first cause.

    rank 2   stage 2 raises ── writes cause ─ closes its connections ───────────── raises its own error
    rank 1   ... waits for rank 2: connection closed ── reads cause ─ closes its own ── StageFailedError: stage 2 ...
    rank 0   ... waits for rank 1: connection closed ── reads cause ─────────────────── StageFailedError: stage 2 ...

A gloo wait ends when its connection closes, so closing connections wakes up waiting ranks. The cause is in the group's
store, where only the first writer succeeds. A process that dies closes its connections, too; then the ranks that waited
for it write the cause.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from muster.ddp.timeouts import AT_ONCE_S, STORE_S, ask_store, patience

LISTEN_S: Final = 2.0  # a failing rank writes the cause before it closes its connections, so a short wait is enough
POLL_S: Final = 0.02
CAUSE: Final = "cause"


class StageFailedError(RuntimeError):
    """Raised if another rank's stage failed, or its process is lost. The message names the first cause."""


class LostError(RuntimeError):
    """Raised if a message cannot be sent or received, and this rank is not the cause."""


class Board:
    """The entry in the group's store to which ranks write the cause of a failure. Only the first write counts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def write(self, cause: str) -> str:
        """Write a cause unless there is one already; return the first one."""
        limit_s = patience(STORE_S) or AT_ONCE_S
        return self._ask(lambda store: str(store.compare_set(CAUSE, "", cause).decode()), limit_s) or cause

    def read(self) -> str | None:
        """Return the cause that another rank wrote, waiting up to `LISTEN_S`; None if there is none."""
        listen_s = patience(LISTEN_S)
        return self._ask(partial(_listen, listen_s), listen_s + STORE_S if listen_s else AT_ONCE_S)

    def _ask(self, question: Callable[[Store], str | None], limit_s: float) -> str | None:
        return ask_store(self._group, f"pipe/{self._group.group_name}", question, limit_s)


def _listen(listen_s: float, store: Store) -> str | None:
    deadline = time.monotonic() + listen_s
    while not store.check([CAUSE]):
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    cause: str = store.get(CAUSE).decode()
    return cause


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
