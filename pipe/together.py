"""Run a collective operation of a pipeline: if one rank fails, all ranks fail and report the same first cause."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from muster.pipe.wires.failures import LostError, StageFailedError, first_line
from muster.pipe.wires.meeting import Meeting

Result = TypeVar("Result")


class Place(NamedTuple):
    """The position of a rank in its schedule."""

    stage: int
    in_words: str


class Together:
    """Runs operations that need all ranks. After a failure it closes the connections and refuses further operations."""

    def __init__(self, meeting: Meeting | None) -> None:
        self._meeting = meeting
        self._ended: str | None = None  # why further operations are refused

    def do(self, work: Callable[[], Result], place: Callable[[], Place | None]) -> Result:
        """Run `work`. If it fails, `place` returns the position of this rank in the step, or None between steps.

        Raises:
            StageFailedError: If another rank's stage failed, now or before.
            Exception: Whatever `work` raised on this rank.
        """
        if self._ended is not None:
            raise StageFailedError(f"this pipeline has ended: {self._ended}; build a new one, with a new group")
        try:
            return work()
        except LostError as error:
            self._ended = self._hear(error)
            raise StageFailedError(self._ended) from error
        except BaseException as error:
            self._ended = self._tell(error, place())
            raise

    def _tell(self, error: BaseException, place: Place | None) -> str:
        """Report to the other ranks why this rank stops; return the cause that all ranks report."""
        rank = _rank_in_words()
        where = rank if place is None else f"stage {place.stage} on {rank}"
        if place is not None and hasattr(error, "add_note"):
            error.add_note(f"in {where}, {place.in_words}")
        cause = f"{where} failed: {first_line(error)}"
        if self._meeting is not None:
            cause = self._meeting.board.tell(cause)
            self._meeting.abort()
        return cause

    def _hear(self, lost: LostError) -> str:
        """Return the reason that another rank reported, or report that a rank is lost."""
        cause = f"{_rank_in_words()}: {lost}"
        if self._meeting is not None:
            cause = self._meeting.board.hear() or self._meeting.board.tell(cause)
            self._meeting.abort()
        return cause


def _rank_in_words() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else 0}"  # of the world: the group may be a part of it
