"""Find the rank that caused a launch to fail, from the endings of all workers. Pure.

workers failed for reasons of their own       the earliest of these
one worker hangs, stopped by a signal         that worker
some wait or lost a peer, others did          of the others, the one that is behind, because the rest
not report                                    waited for it
all are the same                              the one that is behind, if any; else the rank is unknown
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from muster.jobs.world.forked import Ended


@dataclass(frozen=True)
class WorkerEnd(Ended):
    """The ending of one rank's worker, as seen by its launch manager. Ranks exchange it as JSON."""

    rank: int = 0
    cell: int | None = None  # the cell that the worker was measuring
    pair: tuple[int, int] | None = None  # the pair of nodes that the worker measured last

    @property
    def is_cause(self) -> bool:
        """True if the worker itself failed, not as a consequence of another rank."""
        return self.how in ("raised", "died") and not self.lost


@dataclass(frozen=True)
class Blame:
    """The cause of a failure, for a row. `rank` and `cell` are None if unknown."""

    rank: int | None
    state: Literal["failed", "timeout"]
    reason: str
    cell: int | None


def judge(endings: Sequence[WorkerEnd], timeout_s: float) -> Blame:
    """Find the rank to blame from the endings of all ranks, at least one of which is not `done`."""
    if causes := [each for each in endings if each.is_cause]:
        first = min(causes, key=lambda each: (each.time, each.rank))
        joined = ": " if first.how == "raised" else " "
        return Blame(first.rank, "failed", f"rank {first.rank}{joined}{first.message}", first.cell)
    silent = [each for each in endings if each.how == "silent"]
    victims = [each for each in endings if each.how in ("raised", "died")]
    late = f"no progress for {timeout_s:g} s (timeout_s)"
    if stopped := [each for each in silent if each.stopped]:
        who = _behind(stopped)
        return Blame(who.rank, "timeout", f"{late}: rank {who.rank} is suspended by a signal", who.cell)
    if silent and victims:
        who = _behind(silent)
        return Blame(who.rank, "timeout", f"{late}: rank {who.rank} did not arrive{_place(who)}", who.cell)
    left = silent or victims
    who = _behind(left)
    is_behind = any(each.beats > who.beats for each in endings)
    if silent:
        reason = f"{late}: rank {who.rank} is behind{_place(who)}" if is_behind else f"{late}: all ranks wait"
        return Blame(who.rank if is_behind else None, "timeout", reason, who.cell)
    first = min(victims, key=lambda each: each.time)
    behind = f"; rank {who.rank} is behind" if is_behind else ""
    state: Literal["failed", "timeout"] = "timeout" if "imed out" in first.message else "failed"
    return Blame(who.rank if is_behind else None, state, f"rank {first.rank}: {first.message}{behind}", first.cell)


def pair_culprit(endings: Sequence[WorkerEnd]) -> WorkerEnd | None:
    """Return the ending that shows which pair of nodes failed; None if no pair was being measured.

    The best evidence is a worker that failed by itself or is suspended. A worker that lost its partner is better
    evidence than a worker that only waited for the end of the round.
    """
    met = [each for each in endings if each.pair is not None and each.how != "done"]
    for group in (
        [each for each in met if each.is_cause],
        [each for each in met if each.stopped],
        [each for each in met if each.lost],
    ):
        if group:
            return min(group, key=lambda each: (each.time, each.rank))
    return None


def _behind(endings: Sequence[WorkerEnd]) -> WorkerEnd:
    return min(endings, key=lambda each: (each.beats, each.rank))


def _place(ending: WorkerEnd) -> str:
    return f" (it is at {ending.message})" if ending.message else ""
