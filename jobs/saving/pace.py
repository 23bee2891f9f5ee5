"""A rank's progress on the page that its parent reads, and the step at which to stop.

To stop, the rank parents ask all ranks to wait, read the step of the first rank that waits, and set one step at which
all ranks stop. Slower ranks continue up to that step, so that all ranks save the same state.
"""

import time
from typing import Final

from muster.jobs.node import page
from muster.jobs.node.page import NEVER, Phase

HELD_POLL_S: Final = 0.001
OF_LATE: Final = 100  # number of steps that count as recent


class Pace:
    """A rank's access to its page: it writes its progress, and reads requests between steps.

    `timed`: also write the duration of the slowest recent step, from which the time limit of a step follows
    (`launch/supervision/progress.py`).
    """

    def __init__(self, *, timed: bool = True) -> None:
        self.page = page.own
        self.timed = timed
        self.page.enter(Phase.RUN)
        self._began_s = 0.0
        self._slowest_s = [0.0, 0.0]  # longest of the previous OF_LATE steps, and longest step since then
        self._steps = 0

    def stops(self, done: int) -> bool:
        """Return True to stop instead of beginning the next step. If asked to wait, first wait for the stop step.

        The wait has no timeout: the rank parent decides, and if it dies, so does this rank. It withdraws the request
        if other ranks are lost meanwhile.
        """
        if self.page.hold and self.page.stop_at == NEVER:
            self.page.held = done
            while self.page.hold and self.page.stop_at == NEVER:
                time.sleep(HELD_POLL_S)
            self.page.held = NEVER
        self._began_s = time.monotonic()
        return NEVER != self.page.stop_at <= done

    def step_done(self, done: int) -> None:
        """Record the end of a step; `done` counts steps since the beginning of training."""
        if self._steps == OF_LATE:
            self._slowest_s, self._steps = [self._slowest_s[1], 0.0], 0
        self._steps += 1
        self._slowest_s[1] = max(self._slowest_s[1], time.monotonic() - self._began_s)
        self.page.step_done(done, max(self._slowest_s) if self.timed else 0.0)
