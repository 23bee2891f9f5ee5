"""What a rank tells its keeper while it runs: JSON lines over a pipe that the keeper opened before the fork.

    {"report": "arrived"}                               about to meet the others
    {"report": "joined"}                                has met them
    {"report": "progress", "step": 20, "steps": 196, "loss": 2.1, "rate": 812.0, "unit": "samples/s"}
    {"report": "loaded", "step": 40, "seconds": 0.2, "checkpoint": "step-00000040.a000"}    its state is a checkpoint's
    {"report": "first_step", "step": 41}                the first step of this attempt is done
    {"report": "replayed", "steps": 12, "seconds": 3.1, "compared": 12, "worst": 0.0}       steps done a second time
    {"report": "saved", "step": 60, "checkpoint": "step-00000060.a001", "stall_s": 0.03, "seconds": 0.6, "bytes": 9}
    {"report": "missed", "step": 80, "missed": 1, "message": "..."}     a save that came to nothing; how many in a row
    {"report": "failed", "kind": "ValueError", "message": "...", "peer": false, "time": 1700000000.0}

`peer` is true when the failure is a lost connection to another rank: such a rank is a victim if any other failed
for a reason of its own. Without the pipe (torchrun, srun) every report is dropped. A full pipe drops reports too:
telling must never slow a step. But for `missed` and `failed`, which any rank tells, all after `joined` is rank 0's.
A program that does not know its total of steps, a loss or a rate leaves those fields of `progress` out.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from muster.jobs.hosts import ranks

LONGEST_KIND: Final = 200  # characters


class Reporter:
    """The writing end of a rank's pipe; silent when there is none. Programs that the rank starts do not inherit it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.descriptor = ranks.inherited(environ, ranks.STATUS_FD)
        if self.descriptor is not None:
            os.set_blocking(self.descriptor, False)
            os.set_inheritable(self.descriptor, False)

    def arrived(self) -> None:
        """Say that this rank is about to meet the others."""
        self._send({"report": "arrived"})

    def joined(self) -> None:
        """Say that this rank has met the others."""
        self._send({"report": "joined"})

    def progress(
        self,
        *,
        step: int,
        steps: int | None = None,
        loss: float | None = None,
        rate: float | None = None,
        unit: str | None = None,
    ) -> None:
        """Say how far the training is; only rank 0 does. What is None is left out."""
        fields = {"step": step, "steps": steps, "loss": loss, "rate": rate, "unit": unit}
        self._send({"report": "progress", **{name: value for name, value in fields.items() if value is not None}})

    def loaded(self, *, step: int, seconds: float, checkpoint: str) -> None:
        """Say that the state of a checkpoint has been read: the training goes on after `step` steps."""
        self._send({"report": "loaded", "step": step, "seconds": seconds, "checkpoint": checkpoint})

    def first_step(self, step: int) -> None:
        """Say that the first step of this attempt is done: `step` steps in all."""
        self._send({"report": "first_step", "step": step})

    def replayed(self, *, steps: int, seconds: float, compared: int, worst: float) -> None:
        """Say that the steps which an earlier attempt had done are done again.

        `compared` of them had a loss in the log; `worst` is the largest relative difference from it.
        """
        self._send({"report": "replayed", "steps": steps, "seconds": seconds, "compared": compared, "worst": worst})

    def saved(self, *, step: int, checkpoint: str, stall_s: float, seconds: float, nbytes: int) -> None:
        """Say that a checkpoint is committed: how long training stood still for it, and how long all of it took."""
        self._send(
            {
                "report": "saved",
                "step": step,
                "checkpoint": checkpoint,
                "stall_s": stall_s,
                "seconds": seconds,
                "bytes": nbytes,
            }
        )

    def missed(self, *, step: int, missed: int, message: str) -> None:
        """Say that a save came to nothing; `missed` is how many in a row failed, 0 when one was only left out."""
        self._send({"report": "missed", "step": step, "missed": missed, "message": " ".join(message.split())[:500]})

    def failed(self, error: BaseException, *, peer: bool) -> None:
        """Say why this rank is about to end, with the time it noticed."""
        message = " ".join(str(error).split())[:500]
        kind = type(error).__name__[:LONGEST_KIND]
        self._send({"report": "failed", "kind": kind, "message": message, "peer": peer, "time": time.time()})

    def _send(self, report: dict[str, Any]) -> None:
        if self.descriptor is None:
            return
        try:
            os.write(self.descriptor, (json.dumps(report) + "\n").encode())
        except (BlockingIOError, BrokenPipeError):
            # Full: the keeper is behind, and telling must not slow a step. Broken: it is gone, and so shall we be.
            return
