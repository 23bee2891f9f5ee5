"""Rows of whole epochs, in `epochs.jsonl`: time, rate, mean loss, and the evaluation after the epoch.

    steps        losses of a log point ──add──→ sums of the epoch ──last step──→ a finished epoch
    evaluation   after the last step   ─────────────────────────────────────────→ its row, when both are known

If a later attempt repeats an epoch, it appends another row, and the newest row counts. If an attempt began within the
epoch, the row covers the steps from `from_step` on.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.jobs.basics.rowlog import RowLog


@dataclass
class EpochSums:
    """Sums over the steps of one epoch, in one attempt; `epoch` counts from 1, as in rows."""

    epoch: int
    from_step: int
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float = 0.0  # sum of the losses of all samples

    def add(self, step: int, *, samples: int, loss: float, seconds: float) -> None:
        """Add a step with its mean loss over the global batch."""
        self.step = step
        self.samples += samples
        self.seconds += seconds
        self.loss += loss * samples


class EpochLog:
    """The writer of the rows, on rank 0. `evaluates`: each row waits for the evaluation after its epoch."""

    def __init__(self, log: RowLog | None, common: Mapping[str, Any], *, evaluates: bool, samples: int) -> None:
        self.log = log
        self.common = common
        self.evaluates = evaluates
        self.samples = samples  # number of samples in a whole epoch
        self.current: EpochSums | None = None
        self._finished: list[EpochSums] = []
        self._evaluated: dict[int, Mapping[str, float | None]] = {}  # by epoch

    def add(self, epoch: int, step: int, stop: int, *, samples: int, loss: float, seconds: float) -> None:
        """Add a step, which ends before sample `stop` of its epoch."""
        if self.current is None or self.current.epoch != epoch:
            self.current = EpochSums(epoch, step)
        self.current.add(step, samples=samples, loss=loss, seconds=seconds)
        if stop == self.samples:
            self._finished.append(self.current)
            self.current = None

    def evaluated(self, epoch: int, values: Mapping[str, float | None]) -> None:
        """Keep the result of the evaluation after an epoch."""
        self._evaluated[epoch] = values

    def write(self, units_per_sample: int, unit: str, *, at_end: bool = False) -> list[dict[str, Any]]:
        """Write the rows that are complete, and `at_end` also those whose evaluation did not take place."""
        ready = [each for each in self._finished if at_end or not self.evaluates or each.epoch in self._evaluated]
        self._finished = [each for each in self._finished if each not in ready]
        rows = [self._row(each, units_per_sample, unit) for each in ready]
        if self.log is not None and rows:
            self.log.append(rows)
        return rows

    def _row(self, sums: EpochSums, units_per_sample: int, unit: str) -> dict[str, Any]:
        mean = sums.loss / max(sums.samples, 1)
        evaluation = self._evaluated.pop(sums.epoch, {})
        return {
            "epoch": sums.epoch,
            **self.common,
            "from_step": sums.from_step,
            "step": sums.step,
            "loss": mean if mean - mean == 0.0 else None,  # NaN and infinity are not JSON
            "seconds": sums.seconds,
            "rate": sums.samples * units_per_sample / max(sums.seconds, 1e-9),
            "unit": unit,
            "time": time.time(),
            **{f"evaluation_{name}": value for name, value in evaluation.items()},
        }
