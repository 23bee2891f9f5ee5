"""Detect hangs: no rank has made progress for longer than its current phase may take. Pure.

    a rank's phase          may last without progress for
    start                   any time: start_timeout_s applies; a program without a session stays in this phase
    run, end                hang_s; by default 30 s, or 10 times the slowest recent step if that is longer
    load, save, evaluate    10 x hang_s; by default 600 s, or the limit of a step if that is longer
    run, its first step     the same: kernels are compiled, caches filled

Ranks wait for each other, so the longest limit of any rank applies to all. A rank that waits for rank 0's save is not
hung. Each node's progress record contains the phases of its ranks and their last progress (launch/node/pulse.py).

If the job sets hang_s, programs without a session hang when no rank has written output for that long. Before the first
output, the limit is at least start_timeout_s, because importing large libraries prints nothing.
"""

import re
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
OUTPUT: Final = "output"  # replaces the phase for programs without a session
DURATION: Final = re.compile(r"(?<=\bmade no progress) for \d+ s\b")

Record = tuple[Mapping[str, Any] | None, float]  # a node's newest progress record, and when it arrived (monotonic)


@dataclass(frozen=True)
class Hang:
    """A hang: no progress of any rank for `seconds`. `phase`: the current phase with the longest limit, `limit_s`."""

    seconds: float
    limit_s: float
    phase: str
    steps: int  # steps done by the rank that is farthest ahead

    @property
    def text(self) -> str:
        """Describe the hang; `without_duration` removes the seconds, which differ each time."""
        return f"made no progress for {self.seconds:.0f} s after step {self.steps}"


def without_duration(message: str) -> str:
    """Return a message about a hang without its seconds, to compare it with that of another attempt."""
    return DURATION.sub("", message)


def limit_s(phase: str, slowest_s: float, hang_s: float | None) -> float | None:
    """Return how many seconds a rank in a phase may go without progress; None: no limit.

    `slowest_s`: the duration of the slowest recent step; 0.0: no step was done since the ranks were started.
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
    """Return a Hang if the ranks of all nodes hang, else None; `now` is on the same clock as the records' times.

    Nodes without ranks, or without a report so far, are ignored. If the newest report of a node is old, the result is
    None: either the node is about to be lost, or the supervisor itself did not run and has not read the newer reports
    yet.
    """
    told = _told(records, now)
    if not told:
        return None
    slowest_s = max(record["slowest_s"] for record, _ in told)
    phases = {phase for record, _ in told for phase in record["phases"]}
    limits = {phase: limit_s(phase, slowest_s, hang_s) for phase in phases}
    known = {phase: limit for phase, limit in limits.items() if limit is not None}
    if len(known) < len(limits):
        return None
    phase = max(known, key=lambda each: (known[each], each))
    seconds = min(record["beats_age_s"] + now - at for record, at in told)
    if seconds <= known[phase]:
        return None
    return Hang(seconds, known[phase], phase, max(record["steps"] for record, _ in told))


def silence(records: Sequence[Record], now: float, hang_s: float, began: float, start_timeout_s: float) -> Hang | None:
    """Return a Hang if programs without a session wrote no output for too long. `began`: their start (monotonic)."""
    told = _told(records, now)
    if not told or any(record["sessions"] for record, _ in told):
        return None
    ages = [record["output_age_s"] + now - at for record, at in told if record["output_age_s"] is not None]
    seconds = min(ages) if ages else now - began
    limit = hang_s if ages else max(hang_s, start_timeout_s)
    return Hang(seconds, limit, OUTPUT, 0) if seconds > limit else None


def _told(records: Sequence[Record], now: float) -> list[tuple[Mapping[str, Any], float]]:
    """Return the records of nodes that have ranks; an empty list if any of these records is old."""
    told = [(record, at) for record, at in records if record is not None and record["phases"]]
    return [] if any(now - at > FRESH_S for _, at in told) else told
