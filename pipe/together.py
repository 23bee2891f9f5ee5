"""What the ranks of a pipeline do together: where one of them fails, all do, and all name the first cause."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from muster.pipe.wires.failures import LostError, StageFailedError, first_line
from muster.pipe.wires.meeting import Meeting

Result = TypeVar("Result")


class Place(NamedTuple):
    """Where a rank is in its row."""

    stage: int
    in_words: str


class Together:
    """Guards what needs all ranks: after a failure connections are closed, and nothing can be done again."""

    def __init__(self, meeting: Meeting | None) -> None:
        self._meeting = meeting
        self._ended: str | None = None  # why nothing can be done again

    def do(self, work: Callable[[], Result], place: Callable[[], Place | None]) -> Result:
        """Do something that needs all ranks; `place` is asked what this rank works on if it fails, None between steps.

        Raises:
            StageFailedError: another rank's stage failed, now or before.
            Exception: what this rank's work raised.
        """
        if self._ended is not None:
            raise StageFailedError(f"this pipeline has ended: {self._ended}; build a new one, of a new group")
        try:
            return work()
        except LostError as error:
            self._ended = self._hear(error)
            raise StageFailedError(self._ended) from error
        except BaseException as error:
            self._ended = self._tell(error, place())
            raise

    def _tell(self, error: BaseException, place: Place | None) -> str:
        """Tell the others why this rank stops; return the cause that all name."""
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
        """Hear why another rank has stopped, or say that it is gone."""
        cause = f"{_rank_in_words()}: {lost}"
        if self._meeting is not None:
            cause = self._meeting.board.hear() or self._meeting.board.tell(cause)
            self._meeting.abort()
        return cause


def _rank_in_words() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else 0}"  # of the world: the group may be a part of it
