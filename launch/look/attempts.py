"""Which attempt of a run to show, and which of its ranks."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from muster.jobs.basics.errors import NotFoundError
from muster.jobs.runfolder.rundir import AttemptDir, RunDir
from muster.launch.common import rankset


class OfRank(Protocol):
    """What one rank has recorded."""

    @property
    def rank(self) -> int:
        """Its rank."""


Record = TypeVar("Record", bound=OfRank)


def newest_with(
    run: RunDir, attempt: int | None, read: Callable[[AttemptDir], list[Record]], lacking: str
) -> tuple[int, list[Record]]:
    """Return the attempt that is asked for, or the newest of which `read` finds anything, and what it finds.

    Raises:
        NotFoundError: it finds nothing; `lacking` says what is not there, and what to do.
    """
    for latest in reversed(run.attempt_numbers() if attempt is None else [attempt]):
        if found := read(run.attempt(latest)):
            return latest, found
    raise NotFoundError(f"{of_run(run, attempt)}: {lacking}")


def of_run(run: RunDir, attempt: int | None) -> str:
    """Name a run, or one attempt of it, for a message."""
    return run.run_id if attempt is None else f"attempt {attempt} of {run.run_id}"


def of_ranks(found: Sequence[Record], asked: str, world_size: int) -> list[Record]:
    """Return the records of the ranks that are asked for, like 0,8-15, by rank.

    Raises:
        UsageError: no list of ranks, or a rank that the run does not have.
        NotFoundError: a rank that has recorded nothing.
    """
    wanted, there = rankset.parse(asked, option="--rank", count=world_size), {each.rank for each in found}
    if missing := wanted - there:
        raise NotFoundError(
            f"--rank: nothing is recorded of rank {rankset.fold(missing)}, only of {rankset.fold(there)}"
        )
    return sorted((each for each in found if each.rank in wanted), key=lambda each: each.rank)
