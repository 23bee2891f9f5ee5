"""Decide when to save. Rank 0 decides by its clock and sends the step to the other ranks (`jobs/saving/saver.py`).

`every_steps` counts from the beginning of training, so that a resume does not shift the saves. `every_s` is converted
to steps at every log point, with the duration of recent steps.
"""

import math
import time
from collections.abc import Callable

from muster.jobs.basics.files import read_lines
from muster.jobs.checkpoint.interval import mean_time_between_failures, young_daly
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.policy import Policy

GUESSED_STALL_S = 0.05  # assumed until the first save is measured


class SaveSchedule:
    """The schedule of saves. Only rank 0's schedule counts."""

    def __init__(
        self,
        settings: Policy,
        done: int,
        *,
        elapsed_s: float = 0.0,
        failures: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.began_s = self.saved_s = self._asked_s = clock()
        self._asked_done = done
        self._step_s = 0.0
        self.elapsed_s = elapsed_s  # duration of all earlier attempts
        self.failures = failures
        self.stall_s = GUESSED_STALL_S
        self.save_s = 0.0

    def measured(self, *, stall_s: float, save_s: float) -> None:
        """Record the cost of a save: how long training stalled, and how long the whole save took."""
        self.stall_s, self.save_s = stall_s, save_s

    @property
    def interval_s(self) -> float:
        """Seconds between two saves."""
        if isinstance(self.settings.every_s, int | float):
            return self.settings.every_s
        mtbf_s = mean_time_between_failures(self.elapsed_s + self.clock() - self.began_s, self.failures)
        return young_daly(self.stall_s, mtbf_s, step_s=self._step_s, save_s=self.save_s)

    def last_due(self, done: int) -> int:
        """Return after how many of `done` steps the last save was due; 0 if none was, or the clock decides."""
        every = self.settings.every_steps
        return 0 if every is None else done // every * every

    def ask(self, done: int) -> tuple[bool, int]:
        """Return whether to save now, after `done` steps, and after how many steps the next save is due."""
        if self.settings.every_steps is not None:
            every = self.settings.every_steps
            return done % every == 0, (done // every + 1) * every
        now = self.clock()
        if done > self._asked_done:
            self._step_s = (now - self._asked_s) / (done - self._asked_done)
            self._asked_s, self._asked_done = now, done
        left_s = self.interval_s - (now - self.saved_s)
        # Save now if the interval ends within half a step: this step is then closer to its end than the next one.
        saves = left_s <= self._step_s / 2
        if saves:
            self.saved_s, left_s = now, self.interval_s
        return saves, done + max(1, round(left_s / max(self._step_s, 1e-6)))


def failures_so_far(run: RunDir) -> tuple[float, int]:
    """Return the total duration of a run's attempts in seconds, and the number of attempts that failed."""
    elapsed_s, failures = 0.0, 0
    for row in read_lines(run.attempts):
        started, ended = row.get("started"), row.get("ended")
        if isinstance(started, int | float) and isinstance(ended, int | float) and math.isfinite(ended - started):
            elapsed_s += max(ended - started, 0.0)
            failures += row.get("class") not in ("done", "requeue", "stopped")
    return elapsed_s, failures
