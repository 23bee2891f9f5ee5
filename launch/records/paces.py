"""Read the newest steps of the ranks from the ends of their metrics, and watch for persistently slow ranks.

    metrics-RRRRR.jsonl   ──the end──→ the newest steps of a rank ──→ its pace ─┐
    the other ranks'      ──────────────────────────────────────→ their paces ─┴→ a window ──→ stragglers.py

A step counts if its waits were measured apart from its computation. In CUDA graphs, in pipelines on GPUs and in
programs with a session they are not, so those ranks have no pace.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Annotated, Final, TypeAlias

import msgspec

from muster.jobs.basics.reading import read_end
from muster.jobs.runfolder.rundir import AttemptDir
from muster.launch.common.fields import LARGEST, MOST
from muster.launch.records.stragglers import (
    STEPS,
    WINDOWS,
    RankPace,
    Slowness,
    Team,
    Unit,
    Verdicts,
    Window,
    persistent,
    suspects_in,
)

TAIL_BYTES: Final = 1 << 16  # about 130 steps
NEWEST: Final = 100  # steps of a rank in a window
LONG_TAIL_BYTES: Final = 1 << 18  # about 500 steps, to judge all windows at once
MOST_READ: Final = 1024  # ranks whose files are read at once
READ_SHARE: Final = 0.01  # of a core
WINDOW_S: Final = 2.0  # between two windows
CENTRAL: Final = 1.29  # half-width of a median's 99 % interval, in ranks of the sorted values, is 1.29 sqrt(n)

Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=LARGEST)]
Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0.0, le=LARGEST)]


class StepRow(msgspec.Struct, gc=False):
    """A step of one rank, times in seconds."""

    step: Annotated[int, msgspec.Meta(ge=1, le=MOST)]
    step_s: Positive
    data_s: Amount = 0.0
    forward_s: Amount = 0.0
    backward_s: Amount = 0.0
    communication_s: Amount | None = None
    optimizer_s: Amount = 0.0
    samples: Amount = 0.0

    @property
    def own_s(self) -> float:
        """The time without waiting for other ranks."""
        return max(0.0, self.step_s - (self.communication_s or 0.0))


_ROWS: Final = msgspec.json.Decoder(StepRow)


def newest_steps(attempt: AttemptDir, rank: int, most_bytes: int = TAIL_BYTES) -> list[StepRow]:
    """Read the newest steps of a rank whose waits were measured, in order. Invalid rows are dropped.

    Raises:
        OSError, UntrustedError: if the file exists but cannot be read.
    """
    try:
        data = read_end(attempt.metrics(rank), most_bytes)
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[:-1]
    lines = lines[1:] if len(data) == most_bytes else lines
    rows = []
    for line in lines:
        try:
            row = _ROWS.decode(line)
        except (msgspec.DecodeError, RecursionError):  # torn, or not a step
            continue
        if row.communication_s is not None and row.forward_s > 0.0:
            rows.append(row)
    return rows


def pace_of(rows: Sequence[StepRow]) -> RankPace | None:
    """Summarize some steps of a rank; None if they are too few."""
    if len(rows) < STEPS:
        return None
    own = sorted(row.own_s for row in rows)
    parts = (
        median(row.data_s for row in rows),
        median(row.forward_s + row.backward_s for row in rows),
        median(row.optimizer_s for row in rows),
    )
    low = max(0, int(len(own) / 2 - CENTRAL * len(own) ** 0.5))
    waits_s = median(row.communication_s or 0.0 for row in rows)
    samples = fmean(row.samples for row in rows)
    return RankPace(rows[0].step, rows[-1].step, median(own), own[low], waits_s, samples, parts)


def cut(steps: Mapping[int, Sequence[StepRow]], most: int = 2 * WINDOWS) -> list[Window]:
    """Cut the recorded steps of all ranks into at most `most` windows of the same steps, oldest first."""
    numbers = [row.step for rows in steps.values() for row in rows]
    if not numbers:
        return []
    first, last = min(numbers), max(numbers) + 1
    count = max(1, min(most, (last - first) // STEPS))
    bounds = [first + (last - first) * at // count for at in range(count + 1)]
    windows: list[Window] = []
    for begin, end in pairwise(bounds):
        paces = {rank: pace_of([row for row in rows if begin <= row.step < end]) for rank, rows in steps.items()}
        windows.append({rank: pace for rank, pace in paces.items() if pace is not None})
    return windows


def judged_at_once(attempt: AttemptDir, teams: Sequence[Team]) -> dict[Unit, Slowness]:
    """Return the persistently slow units of a run without a supervisor, from the ends of its files."""
    ranks = _ranks(teams)[:MOST_READ]
    windows = cut({rank: newest_steps(attempt, rank, LONG_TAIL_BYTES) for rank in ranks})
    return persistent([suspects_in(window, teams) for window in windows])


class PaceWatch:
    """A watch over the paces of one attempt's ranks. Its memory is one window and a few verdicts.

    `look` reads some ranks at a time, and returns how long to wait before the next call, so that reading takes at most
    READ_SHARE of a core.
    """

    def __init__(self, attempt: AttemptDir, teams: Sequence[Team], clock: Callable[[], float] = time.monotonic) -> None:
        self.attempt = attempt
        self.teams = teams
        self.found: dict[Unit, Slowness] = {}
        self._clock = clock
        self._ranks = _ranks(teams)
        self._next = 0
        self._began = clock()
        self._window: dict[int, RankPace] = {}
        self._last: dict[int, int] = {}  # the last step of each rank in its window before
        self._verdicts: deque[Verdicts] = deque(maxlen=WINDOWS)

    def look(self, most: int = MOST_READ) -> float:
        """Read the next `most` ranks' files; judge the window once every rank has been read. Errors as newest_steps."""
        before = time.thread_time()
        for rank in self._ranks[self._next : self._next + most]:
            rows = [row for row in newest_steps(self.attempt, rank) if row.step > self._last.get(rank, 0)]
            if (pace := pace_of(rows[-NEWEST:])) is not None:
                self._window[rank] = pace
        self._next += most
        pause_s = (time.thread_time() - before) / READ_SHARE
        if self._next < len(self._ranks):
            return pause_s
        self._judge()
        now, self._next = self._clock(), 0
        pause_s = max(pause_s, self._began + WINDOW_S - now)
        self._began = now + pause_s
        return pause_s

    def _judge(self) -> None:
        if 3 * len(self._window) < 2 * len(self._ranks):
            return  # too few new steps: the window grows until the next look
        self._verdicts.append(suspects_in(self._window, self.teams))
        self.found = persistent([*self._verdicts], self.found)
        self._last |= {rank: pace.last for rank, pace in self._window.items()}
        self._window = {}


def _ranks(teams: Iterable[Team]) -> list[int]:
    return sorted(rank for team in teams for unit in team for rank in unit)
