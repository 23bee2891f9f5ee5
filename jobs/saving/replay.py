"""The replay audit: compare the losses of repeated steps with those that an earlier attempt logged.

If a resume restores a wrong position in the data, wrong momenta or a wrong schedule, losses differ after a few steps.
Bitwise equal losses over a dozen steps show that the state was restored completely.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from muster.jobs.basics.files import read_lines
from muster.jobs.basics.words import counted
from muster.jobs.node.reports import Reporter


def logged_losses(metrics: Path, *, after: int, attempt: int) -> dict[int, float | None]:
    """Return the newest loss that earlier attempts logged for each step beyond `after`; None if it was not finite."""
    found: dict[int, float | None] = {}
    for row in read_lines(metrics):
        step, of = row.get("step"), row.get("attempt")
        if row.get("evaluation") or row.get("lost_samples") or not isinstance(step, int) or not isinstance(of, int):
            continue
        if step > after and of < attempt:
            loss = row.get("loss")
            found[step] = loss if isinstance(loss, int | float) else None
    return found


class Replay:
    """A comparison of losses as steps finish. It reports once, after the last logged step was repeated."""

    def __init__(self, logged: dict[int, float | None], reporter: Reporter) -> None:
        self.logged = logged
        self.reporter = reporter
        self.left = set(logged)
        self.began_s = time.monotonic()
        self.steps = 0
        self.worst = 0.0
        self.differs = False

    def check(self, losses: Sequence[tuple[int, float]]) -> str | None:
        """Compare the losses of new steps; return the line to print once all logged steps are compared."""
        if not self.left:
            return None
        last = max(self.logged)
        for step, loss in losses:
            self.steps += step <= last
            if step not in self.left:
                continue
            self.left.discard(step)
            difference = relative_difference(loss, self.logged[step])
            self.worst = max(self.worst, difference)
            self.differs |= difference > 0.0
        if losses and losses[-1][0] >= last:
            self.left.clear()
        return self._report() if not self.left else None

    def _report(self) -> str:
        seconds = time.monotonic() - self.began_s
        worst = self.worst if math.isfinite(self.worst) else 1e308
        self.reporter.replayed(steps=self.steps, seconds=seconds, compared=len(self.logged), worst=worst)
        done = f"{counted(self.steps, 'step')} repeated:"
        if not self.differs:
            return f"{done} the same losses, bit for bit"
        return f"{done} losses differ by at most {self.worst:.1g}, relative to the logged ones"


def relative_difference(now: float, before: float | None) -> float:
    """Return the relative difference of a loss from the logged one. Two losses that are not finite count as equal."""
    if before is None or not math.isfinite(now):
        return 0.0 if before is None and not math.isfinite(now) else math.inf
    return abs(now - before) / max(abs(before), 1e-300) if now != before else 0.0
