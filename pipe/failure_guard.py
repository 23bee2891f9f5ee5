"""Run a pipeline's collective operations. If one rank fails, all ranks fail and report the same first cause."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from muster.pipe.wires.connections import Connections
from muster.pipe.wires.failures import LostError, StageFailedError, first_line

Result = TypeVar("Result")


class Position(NamedTuple):
    """The position of a rank in its schedule."""

    stage: int
    in_words: str


class FailureGuard:
    """Runner of operations that need all ranks.

    After a failure, it closes the connections and refuses further operations.
    """

    def __init__(self, connections: Connections | None) -> None:
        self._connections = connections
        self._ended: str | None = None  # why further operations are refused

    def do(self, work: Callable[[], Result], position: Callable[[], Position | None]) -> Result:
        """Run `work`. If it fails, `position` returns the position of this rank in the step, or None between steps.

        Raises:
            StageFailedError: If a stage of another rank failed, in this operation or an earlier one.
            Exception: The error of `work` on this rank, unchanged.
        """
        if self._ended is not None:
            raise StageFailedError(f"this pipeline has ended: {self._ended}; build a new one, with a new group")
        try:
            return work()
        except LostError as error:
            self._ended = self._read_cause(error)
            raise StageFailedError(self._ended) from error
        except BaseException as error:
            self._ended = self._report(error, position())
            raise

    def _report(self, error: BaseException, position: Position | None) -> str:
        """Report to the other ranks why this rank stops; return the cause that all ranks report."""
        rank = _rank_in_words()
        where = rank if position is None else f"stage {position.stage} on {rank}"
        if position is not None and hasattr(error, "add_note"):
            error.add_note(f"in {where}, {position.in_words}")
        cause = f"{where} failed: {first_line(error)}"
        if self._connections is not None:
            cause = self._connections.board.write(cause)
            self._connections.abort()
        return cause

    def _read_cause(self, lost: LostError) -> str:
        """Return the cause that another rank reported; if there is none, report that a rank is lost."""
        cause = f"{_rank_in_words()}: {lost}"
        if self._connections is not None:
            cause = self._connections.board.read() or self._connections.board.write(cause)
            self._connections.abort()
        return cause


def _rank_in_words() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else 0}"  # its rank in the world, not in the group
