"""Seconds since each rank on this node last made progress, sampled by the rank parent, on this node's clock.

    {"steps": 41, "beats_age_s": 0.7, "ranks": {"3": {"phase": "run", "steps": 40, "beats_age_s": 31.2, "state": "T"}},
     "phases": ["run"], "slowest_s": 0.2, "sessions": 2, "output_age_s": null}

`steps`: the steps done by the rank that is farthest ahead. `beats_age_s`: the age of the most recent beat of any rank.
`ranks`: at most 64 ranks, the longest silent first. `slowest_s`: the duration of the slowest recent step of any rank.
`sessions`: the number of ranks that report progress. `output_age_s`: the time since a program last wrote output, null
before the first output. `phases` is empty when all ranks have ended.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.launch.common.lateness import OwnLateness
from muster.launch.wire.records import MOST_TOLD, Progress, RankProgress

LOOK_S: Final = 1.0  # interval between two samples, and between two reports
QUIET_S: Final = 2.0  # after this silence, the state of a rank's process is read


@dataclass
class _Rank:
    phase: str
    steps: int
    beats: int
    slowest_s: float
    held: int
    session: bool  # the rank reports its progress
    moved: float  # when its beats were last seen to change (monotonic seconds)


class Pulse:
    """The progress of one attempt's ranks on this node. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._steps = 0
        self._begun = False
        self._written = 0  # number of bytes of output so far
        self._wrote: float | None = None  # when the output was last seen to grow
        self._own = OwnLateness(LOOK_S)

    def note(self, looked: Iterable[Sequence[Any]], now: float) -> None:
        """Record a sample: [rank, phase, steps, beats, slowest_s, held, session] of each running rank."""
        self._forgive(now)
        before = self._ranks
        self._ranks = {}
        for rank, phase, steps, beats, slowest_s, held, session in looked:
            known = before.get(rank)
            moved = known.moved if known is not None and known.beats == beats else now
            self._ranks[rank] = _Rank(phase, steps, beats, slowest_s, held, session, moved)
            self._steps, self._begun = max(self._steps, steps), True

    def note_output(self, written: int, now: float) -> None:
        """Record how many bytes the programs have written so far."""
        if written != self._written:
            self._written, self._wrote = written, now

    def ended(self, rank: int, steps: int | None) -> None:
        """Record the end of a rank after `steps` steps (None: a user's program that reports no progress)."""
        self._ranks.pop(rank, None)
        if steps is not None:
            self._steps, self._begun = max(self._steps, steps), True

    def record(self, now: float, state_of: Callable[[int], str] = lambda rank: "") -> Progress | None:
        """Return the progress record; None if no rank has been seen yet.

        `state_of(rank)` returns the process state of a rank. It is called for ranks that have been silent for QUIET_S.
        """
        self._forgive(now)
        if not self._begun:
            return None
        each = self._ranks.values()
        record: Progress = {
            "steps": self._steps,
            "phases": tuple(sorted({rank.phase for rank in each})),
            "beats_age_s": 0.0,
            "slowest_s": 0.0,
            "sessions": sum(rank.session for rank in each),
            "output_age_s": None if self._wrote is None else round(max(0.0, now - self._wrote), 3),
            "ranks": {},
        }
        if self._ranks:
            stalest_first = sorted(self._ranks, key=lambda rank: self._ranks[rank].moved)[:MOST_TOLD]
            record["beats_age_s"] = round(now - max(rank.moved for rank in each), 3)
            record["slowest_s"] = max(rank.slowest_s for rank in each)
            record["ranks"] = {str(rank): self._told(rank, now, state_of) for rank in stalest_first}
        return record

    def seen(self, rank: int) -> dict[str, Any]:
        """Return {"phase", "steps"} of one rank; {} if the rank is unknown."""
        known = self._ranks.get(rank)
        return {} if known is None else {"phase": known.phase, "steps": known.steps}

    @property
    def held(self) -> int | None:
        """The largest step count of the ranks that wait between two steps; None if no rank waits."""
        return max((rank.held for rank in self._ranks.values() if rank.held >= 0), default=None)

    def _told(self, rank: int, now: float, state_of: Callable[[int], str]) -> RankProgress:
        known = self._ranks[rank]
        age_s = round(now - known.moved, 3)
        state = state_of(rank) if age_s >= QUIET_S else ""
        return {"phase": known.phase, "steps": known.steps, "beats_age_s": age_s, "state": state}

    def _forgive(self, now: float) -> None:
        """Exclude time in which this process did not run from the silence of the ranks."""
        late_s = self._own.look(now)
        for rank in self._ranks.values():
            rank.moved += late_s
        if self._wrote is not None:
            self._wrote += late_s
