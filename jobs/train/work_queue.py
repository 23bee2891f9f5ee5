"""Give the parts of batches to workers as they ask, and collect the results: mode asynchronous.

A global batch is cut into one part per worker, as in the synchronous modes. Rank 0 numbers the parts of all steps, and
hands them out in this order. A slow worker gets fewer of them. A lost worker's part is handed out again, so that every
part is trained; an update that the lost worker had already sent remains.

    parts     step 0 | 0 1 2 3 |  step 1 | 4 5 6 7 |  ...      4 workers, rank 3 at half speed
    rank 0             0     4 |         |   6     |
    rank 3                   3 . . . . . . .     8 |
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Final

from muster.jobs.world.world import add_in_order

NONE: Final = -1  # sent in place of a part's number: no part


@dataclass(frozen=True)
class PartResult:
    """The result of one part: the sum of its losses, and its gradient's mean staleness over the servers."""

    loss_sum: float
    staleness: float


@dataclass(frozen=True)
class CompletedStep:
    """A step whose parts have all been trained. With n parts per step, step k (from 0) ends when (k + 1) n parts have.

    `ended` is that time, in Unix seconds.
    """

    step: int
    loss_sum: float
    staleness: Sequence[float]  # the staleness of each part
    ended: float


class WorkQueue:
    """The parts of all steps, on rank 0. Any thread may call its methods."""

    def __init__(self, steps: int, parts: int) -> None:
        self.steps = steps
        self.parts = parts  # number of parts of a step
        self._next = 0
        self._returned: list[int] = []  # parts that lost workers had not finished
        self._held: dict[int, int] = {}  # the part that each worker is training
        self._results: dict[int, PartResult] = {}
        self._ended: list[float] = []  # times at which the training of parts ended, in order
        self._reported = 0  # number of steps that `completed` has returned
        self._changed = Condition()

    def exchange(self, worker: int, part: int, result: PartResult | None) -> int:
        """Accept the result of a worker's part (NONE: it had none); return its next part, or NONE at the end.

        If all parts have been handed out but some are not trained yet, wait, because their workers may be lost.
        """
        total = self.steps * self.parts
        with self._changed:
            if result is not None and self._held.pop(worker, NONE) == part:
                self._results[part] = result
                self._ended.append(time.time())
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._returned or self._next < total or len(self._ended) == total)
            if len(self._ended) == total:
                return NONE
            if self._returned:
                self._held[worker] = self._returned.pop(0)
            else:
                self._held[worker], self._next = self._next, self._next + 1
            return self._held[worker]

    def lose(self, worker: int) -> None:
        """Take back the part of a lost worker."""
        with self._changed:
            if worker in self._held:
                self._returned.append(self._held.pop(worker))
                self._changed.notify_all()

    def completed(self) -> list[CompletedStep]:
        """Return the steps that were completed since the last call, in order."""
        found = list[CompletedStep]()
        with self._changed:
            while self._reported < self.steps:
                own = range(self._reported * self.parts, (self._reported + 1) * self.parts)
                if len(self._ended) < own.stop or not all(part in self._results for part in own):
                    break
                results = [self._results.pop(part) for part in own]
                loss_sum = add_in_order(each.loss_sum for each in results)
                staleness = [each.staleness for each in results]
                found.append(CompletedStep(self._reported, loss_sum, staleness, self._ended[own.stop - 1]))
                self._reported += 1
        return found
