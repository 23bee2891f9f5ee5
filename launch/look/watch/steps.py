"""The newest steps of each rank, read from the ends of its files."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final, NamedTuple

from muster.jobs.basics.reading import parse_json, read_end
from muster.jobs.runfolder.rundir import AttemptDir
from muster.launch.common.fields import moment, number, real, typed_line

WINDOW: Final = 20  # steps
TAIL_BYTES: Final = 1 << 14  # about 30 steps
SWEEP: Final = 64  # number of ranks outside the table whose files are read per refresh, in rotation


class WatchedStep(NamedTuple):
    """One step; `own_s` excludes waiting for other ranks, and is None if that was not measured."""

    number: int
    time: float
    seconds: float
    own_s: float | None


class RankSteps:
    """The newest steps of one rank in an attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: deque[WatchedStep] = deque(maxlen=WINDOW)
        self.step_s: float | None = None  # the median
        self.communication: float | None = None  # share of a step
        self._seen: tuple[int, int] | None = None

    def look(self) -> None:
        """Read new steps. An unterminated last line is left for the next call."""
        try:
            status = self.path.stat()
            if (seen := (status.st_size, status.st_mtime_ns)) == self._seen:
                return
            data = read_end(self.path, TAIL_BYTES)
        except FileNotFoundError:
            return
        self._seen = seen
        lines = data.split(b"\n")[:-1]
        lines = lines[1:] if len(data) == TAIL_BYTES else lines
        known = self.steps[-1].number if self.steps else 0
        self.steps.extend(step for step in _parsed(lines[-WINDOW:]) if step.number > known)
        self._summarize()

    def _summarize(self) -> None:
        if not self.steps:
            return
        self.step_s = median(step.seconds for step in self.steps)
        own = [step.own_s for step in self.steps if step.own_s is not None]
        if own:
            self.communication = max(0.0, 1.0 - fmean(own) / fmean(step.seconds for step in self.steps))

    @property
    def pace_s(self) -> float | None:
        """The mean seconds from one step to the next, including work between steps."""
        first, last = (self.steps[0], self.steps[-1]) if self.steps else (None, None)
        if first is None or last is None or last.number <= first.number:
            return None
        return max(0.0, last.time - first.time) / (last.number - first.number)


def _parsed(lines: Sequence[bytes]) -> Iterator[WatchedStep]:
    """Yield the steps in some lines. All lines are parsed at once for speed, or one by one if a line is invalid."""
    try:
        rows = parse_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        rows = map(typed_line, lines)
    for row in rows:
        if not isinstance(row, dict):
            continue
        place, time, seconds = number(row.get("step"), least=1), moment(row.get("time")), real(row.get("step_s"))
        if place is not None and time is not None and seconds is not None and seconds > 0.0:
            waited_s = real(row.get("communication_s"))
            yield WatchedStep(place, time, seconds, None if waited_s is None else max(0.0, seconds - waited_s))


class AllSteps:
    """The steps of all ranks of one attempt."""

    def __init__(self, attempt: AttemptDir) -> None:
        self.attempt = attempt
        self.ranks: dict[int, RankSteps] = {}
        self._next = 0

    def of(self, rank: int) -> RankSteps:
        """Return the steps of a rank."""
        if rank not in self.ranks:
            self.ranks[rank] = RankSteps(self.attempt.metrics(rank))
        return self.ranks[rank]

    def look(self, world_size: int, shown: Collection[int], sweep: int) -> None:
        """Read the files of rank 0, of the shown ranks, and of `sweep` other ranks in turn."""
        turn = {rank % world_size for rank in range(self._next, self._next + min(sweep, world_size))}
        self._next = (self._next + sweep) % max(world_size, 1)
        for rank in turn | {each for each in {0, *shown} if each < world_size}:
            self.of(rank).look()
