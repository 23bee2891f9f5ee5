"""Whether a job hangs: nobody has made progress for longer than what its ranks are busy with may take. Pure.

    a rank is busy with     it may be silent for
    start                   any time: start_timeout_s governs; a program that opens no session never says more
    run, end                hang_s; by default 30 s, or 10 of the slowest steps of late if that is longer
    load, save, evaluate    10 x hang_s; by default 600 s, or the limit of a step if that is longer
    run, its first step     the same: kernels are compiled, caches filled

Ranks wait for each other, so the longest limit that any of them has is that of all: who waits for rank 0's save does
not hang. What a rank is busy with and when it last moved is in its node's progress record (launch/node/pulse.py).

Programs without a session hang, if the job gives hang_s, when no rank has written anything for so long. Before the
first output they have at least start_timeout_s: an import of large libraries says nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.node.page import Phase

SHORTEST_S: Final = 30.0
STEPS: Final = 10
LONG_S: Final = 600.0
LONGER: Final = 10
FRESH_S: Final = 3.0

START, RUN, END = Phase.START.word, Phase.RUN.word, Phase.END.word
OUTPUT: Final = "output"  # in a phase's place: of programs, only what they write is known

Record = tuple[Mapping[str, Any] | None, float]  # a node's newest progress record, and when it came (monotonic)


@dataclass(frozen=True)
class Hang:
    """Nobody has moved for `seconds`, where `limit_s` is allowed for the phase that is given the most time."""

    seconds: float
    limit_s: float
    phase: str
    steps: int  # that the farthest rank had done


def limit_s(phase: str, slowest_s: float, hang_s: float | None) -> float | None:
    """Return how long a rank in a phase may make no progress; None: as long as it likes.

    `slowest_s` is the slowest step of late, 0.0 when none has been done since the ranks were started.
    """
    if phase == START:
        return None
    if hang_s is not None:
        step_s, long_s = hang_s, LONGER * hang_s
    else:
        step_s = max(SHORTEST_S, STEPS * slowest_s)
        long_s = max(LONG_S, step_s)
    return step_s if phase == END or (phase == RUN and slowest_s > 0.0) else long_s


def hang(records: Sequence[Record], now: float, hang_s: float | None) -> Hang | None:
    """Say whether the ranks of all nodes hang; `now` as the times of the records.

    A node without ranks, or one that has told nothing yet, says nothing. If one has told nothing of late, then nothing
    can be said: either it is about to be lost, or we ourselves stood still and have not yet read what it told.
    """
    told = _told(records, now)
    if not told:
        return None
    slowest_s = max(record["slowest_s"] for record, _ in told)
    limits = {phase: limit_s(phase, slowest_s, hang_s) for record, _ in told for phase in record["phases"]}
    known = {phase: limit for phase, limit in limits.items() if limit is not None}
    if len(known) < len(limits):
        return None
    phase = max(known, key=lambda each: (known[each], each))
    seconds = min(record["beats_age_s"] + now - at for record, at in told)
    if seconds <= known[phase]:
        return None
    return Hang(seconds, known[phase], phase, max(record["steps"] for record, _ in told))


def silence(records: Sequence[Record], now: float, hang_s: float, began: float, start_timeout_s: float) -> Hang | None:
    """Return the hang of programs without a session: no output for too long since `began`, their start (monotonic)."""
    told = _told(records, now)
    if not told or any(record["sessions"] for record, _ in told):
        return None
    ages = [record["output_age_s"] + now - at for record, at in told if record["output_age_s"] is not None]
    seconds = min(ages) if ages else now - began
    limit = hang_s if ages else max(hang_s, start_timeout_s)
    return Hang(seconds, limit, OUTPUT, 0) if seconds > limit else None


def _told(records: Sequence[Record], now: float) -> list[tuple[Mapping[str, Any], float]]:
    """Return the records of nodes that have ranks; none if one of them has told nothing of late."""
    told = [(record, at) for record, at in records if record is not None and record["phases"]]
    return [] if any(now - at > FRESH_S for _, at in told) else told
