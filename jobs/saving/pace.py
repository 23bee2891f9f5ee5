"""How far a rank is, on the page that its keeper reads; and from there where to stop.

The keeper asks all ranks to hold, hears how far the first of them is, and tells all the same number of steps to stop
at: whoever is behind goes on until then, so that all of them save the same state.
"""

import time
from typing import Final

from muster.jobs.node import page
from muster.jobs.node.page import NEVER, Phase

HELD_POLL_S: Final = 0.001
OF_LATE: Final = 100  # steps


class Pace:
    """Writes a rank's page as it trains, and reads it between steps.

    `timed`: it tells how long the slowest step took, from which follows how long the next one may take
    (`launch/supervision/progress.py`).
    """

    def __init__(self, *, timed: bool = True) -> None:
        self.page = page.own
        self.timed = timed
        self.page.enter(Phase.RUN)
        self._began_s = 0.0
        self._slowest_s = [0.0, 0.0]  # of the steps before the newest OF_LATE, and of the newest
        self._steps = 0

    def stops(self, done: int) -> bool:
        """Say whether to stop instead of beginning the next step; wait for the answer where it is not known yet.

        Waiting has no deadline of its own: the keeper that asked is this rank's parent, and takes it along.
        """
        if self.page.hold and self.page.stop_at == NEVER:
            self.page.held = done
            while self.page.stop_at == NEVER:
                time.sleep(HELD_POLL_S)
            self.page.held = NEVER
        self._began_s = time.monotonic()
        return NEVER != self.page.stop_at <= done

    def step_done(self, done: int) -> None:
        """End a step: `done` are done since the training's beginning."""
        if self._steps == OF_LATE:
            self._slowest_s, self._steps = [self._slowest_s[1], 0.0], 0
        self._steps += 1
        self._slowest_s[1] = max(self._slowest_s[1], time.monotonic() - self._began_s)
        self.page.step_done(done, max(self._slowest_s) if self.timed else 0.0)
