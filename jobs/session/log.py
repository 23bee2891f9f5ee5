"""Write logged values as rows. Each rank writes its own row for every step; rank 0 also writes rows of the whole run.

    attempt-NNN/metrics-RRRRR.jsonl   every step of a rank
    metrics.jsonl                     every step of the run: `samples` and `tokens` are summed over the ranks, all other
                                      values averaged; rank 0's own values if the ranks logged different names

Rows are written when the ranks synchronize (`loop.py`). Until then logged values are only collected in a list. All
tensors are read together at that time, so that no step waits for a device.
"""

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.rowlog import RowLog
from muster.jobs.basics.terminal import warn
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.session.together import OneRank

COUNTS: Final = ("tokens", "samples")  # the rate is computed from the first of these values that is logged
OWN: Final = frozenset({"step", "steps", "attempt", "rank", "time", "step_s", "rate", "unit", "epoch", "evaluation"})
RECENT: Final = 20  # number of recent losses stored in a checkpoint


@dataclass
class LoggedStep:
    """One step: its number (from 1), its logged values, its end in unix seconds, and its duration in seconds."""

    number: int
    values: dict[str, Any]
    time: float
    seconds: float


@dataclass
class News:
    """The run's rows for the steps since the last synchronization of the ranks."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) for each step that logged a loss; NaN for a loss that is not finite."""
        found = ((row["step"], row["loss"]) for row in self.rows if "loss" in row)
        return [(step, math.nan if loss is None else loss) for step, loss in found]

    @property
    def logged(self) -> list[dict[str, Any]]:
        """The rows with the logged values and, of the other columns, only step, time, rate and step_s."""
        hidden = OWN - {"step", "time", "rate", "step_s"}
        return [{name: value for name, value in row.items() if name not in hidden} for row in self.rows]

    @property
    def is_sound(self) -> bool:
        """False if the last logged loss is not finite."""
        return not self.losses or math.isfinite(self.losses[-1][1])


class SessionLog:
    """A rank's logged values, collected and then written as rows."""

    def __init__(self, run: RunDir, attempt: int, ranks: OneRank) -> None:
        # If the disk is full, rows wait in memory and the program continues. A save would also report the full disk.
        self.own = RowLog(run.attempt(attempt).metrics(ranks.rank), patient=True, say=warn)
        self.run = RowLog(run.metrics, patient=True, say=warn) if ranks.rank == 0 else None
        self.ranks = ranks
        self.common = {"attempt": attempt, "rank": ranks.rank}
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._values: dict[str, Any] = {}  # values logged in the current step
        self._steps: list[LoggedStep] = []

    def add(self, values: Mapping[str, Any]) -> None:
        """Log values of the current step.

        Raises:
            RefusedError: if a name is reserved for a column of every row, or a value is not a single number.
        """
        self._check(values)
        self._values.update(values)

    def evaluation(self, done: int, values: Mapping[str, Any]) -> None:
        """Write rank 0's values after `done` steps as a separate row. Raises the same errors as `add`."""
        self._check(values)
        if self.run is not None:
            row = {"evaluation": True, "step": done, "time": time.time()} | self.common
            self.run.append([row | {name: _finite(_float(value)) for name, value in values.items()}])

    def _check(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in OWN:
                raise RefusedError(f"run.log: every row already has a column {name}; choose another name")
            if not (isinstance(value, int | float) or getattr(value, "size", None) == 1 or _is_scalar(value)):
                raise RefusedError(f"run.log: {name} must be a number, got {type(value).__name__}; log its mean or sum")

    def step_done(self, done: int, seconds: float) -> None:
        """Record the end of a step; `done` is the number of steps done so far."""
        self._steps.append(LoggedStep(done, self._values, time.time(), seconds))
        self._values = {}

    def __len__(self) -> int:
        """Return the number of steps whose rows are not written yet."""
        return len(self._steps)

    def note(self) -> Sequence[float]:
        """Return the number of new steps and a hash of the logged names.

        Values are averaged over ranks only if this note is the same on all of them.
        """
        names = repr([sorted(step.values) for step in self._steps])
        return (float(len(self._steps)), float(crc32(names.encode())))

    def report(self, notes: Sequence[Sequence[float]], steps: int | None) -> News:
        """Write the rows of all steps since the last report: a collective. `notes` are every rank's `note`."""
        taken, self._steps = self._steps, []
        own = [{name: _float(value) for name, value in step.values.items()} for step in taken]
        means = own
        if len(notes) > 1 and all(note == notes[0] for note in notes):
            means = self._combined(own)
        self.own.append([self._row(step, values, steps) for step, values in zip(taken, own, strict=True)])
        news = News([self._row(step, values, steps) for step, values in zip(taken, means, strict=True)])
        if self.run is not None:
            self.run.append(news.rows)
        self.recent.extend(news.losses)
        return news

    def _combined(self, own: list[dict[str, float]]) -> list[dict[str, float]]:
        """Combine each step's values over all ranks: a collective."""
        flat = [values[name] for values in own for name in sorted(values)]
        if not flat:
            return own
        columns = zip(*self.ranks.exchange(flat), strict=True)
        size = self.ranks.size
        sums = iter([_sum(each) for each in columns])
        combined = ({name: next(sums) for name in sorted(values)} for values in own)
        return [{name: each if name in COUNTS else each / size for name, each in sum_.items()} for sum_ in combined]

    def _row(self, step: LoggedStep, values: Mapping[str, float], steps: int | None) -> dict[str, Any]:
        count = next((name for name in COUNTS if name in values), None)
        amount = 1.0 if count is None else values[count]
        return {
            "step": step.number,
            **({} if steps is None else {"steps": steps}),
            **self.common,
            **{name: _finite(value) for name, value in values.items()},
            "time": round(step.time, 6),
            "step_s": step.seconds,
            "rate": amount / max(step.seconds, 1e-9),
            "unit": f"{count or 'steps'}/s",
        }


def _is_scalar(value: Any) -> bool:
    """Return True if a value is a tensor with one element."""
    elements = getattr(value, "numel", None)
    return callable(elements) and elements() == 1


def _float(value: Any) -> float:
    return float(value.detach()) if hasattr(value, "detach") else float(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _sum(values: Sequence[float]) -> float:
    """Add from first to last. The built-in `sum` gives other last digits from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total


def logger_of(rank: int) -> logging.Logger:
    """Return the logger of a rank."""
    logger = logging.getLogger("muster.run")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[{rank}] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    return logger
