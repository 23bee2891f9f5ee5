"""Selection of the attempt of a run, and of the ranks, that a command shows."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from muster.jobs.basics.errors import NotFoundError
from muster.jobs.runfolder.rundir import AttemptDir, RunDir
from muster.launch.common import rankset


class OfRank(Protocol):
    """A record of one rank."""

    @property
    def rank(self) -> int:
        """The rank that the record belongs to."""


Record = TypeVar("Record", bound=OfRank)


def newest_with(
    run: RunDir, attempt: int | None, read: Callable[[AttemptDir], list[Record]], lacking: str
) -> tuple[int, list[Record]]:
    """Choose an attempt and read its records with `read`. If `attempt` is None, choose the newest with records.

    Raises:
        NotFoundError: if there are no records. The message ends with `lacking`.
    """
    for latest in reversed(run.attempt_numbers() if attempt is None else [attempt]):
        if found := read(run.attempt(latest)):
            return latest, found
    raise NotFoundError(f"{of_run(run, attempt)}: {lacking}")


def of_run(run: RunDir, attempt: int | None) -> str:
    """Name a run, or one attempt of it, for a message."""
    return run.run_id if attempt is None else f"attempt {attempt} of {run.run_id}"


def of_ranks(found: Sequence[Record], asked: str, world_size: int) -> list[Record]:
    """Return the records of the ranks in `asked`, a list such as 0,8-15, sorted by rank.

    Raises:
        UsageError: if `asked` is not a list of ranks, or names a rank that the run does not have.
        NotFoundError: if a rank has no record.
    """
    wanted, there = rankset.parse(asked, option="--rank", count=world_size), {each.rank for each in found}
    if missing := wanted - there:
        raise NotFoundError(
            f"--rank: nothing is recorded for rank {rankset.fold(missing)}; recorded ranks: {rankset.fold(there)}"
        )
    return sorted((each for each in found if each.rank in wanted), key=lambda each: each.rank)
