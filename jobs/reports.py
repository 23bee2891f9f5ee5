"""What a rank tells its keeper while it runs: JSON lines over a pipe that the keeper opened before the fork.

    {"report": "arrived"}                               about to meet the others
    {"report": "joined"}                                has met them
    {"report": "progress", "step": 20, "steps": 196, "loss": 2.1, "rate": 812.0, "unit": "samples/s"}
    {"report": "failed", "kind": "ValueError", "message": "...", "peer": false, "time": 1700000000.0}

`peer` is true when the failure is a lost connection to another rank: such a rank is a victim if any other failed
for a reason of its own. Without the pipe (torchrun, srun) every report is dropped. A full pipe drops reports too:
telling must never slow a step.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from jobs import ranks


class Reporter:
    """The writing end of a rank's pipe; silent when there is none."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        text = environ.get(ranks.STATUS_FD, "")
        self.descriptor = int(text) if text.isdecimal() else None
        if self.descriptor is not None:
            os.set_blocking(self.descriptor, False)

    def arrived(self) -> None:
        """Say that this rank is about to meet the others."""
        self._send({"report": "arrived"})

    def joined(self) -> None:
        """Say that this rank has met the others."""
        self._send({"report": "joined"})

    def progress(self, *, step: int, steps: int, loss: float, rate: float, unit: str) -> None:
        """Say how far the training is; only rank 0 does."""
        self._send({"report": "progress", "step": step, "steps": steps, "loss": loss, "rate": rate, "unit": unit})

    def failed(self, error: BaseException, *, peer: bool) -> None:
        """Say why this rank is about to end, with the time it noticed."""
        message = " ".join(str(error).split())[:500]
        self._send(
            {"report": "failed", "kind": type(error).__name__, "message": message, "peer": peer, "time": time.time()}
        )

    def _send(self, report: dict[str, Any]) -> None:
        if self.descriptor is None:
            return
        try:
            os.write(self.descriptor, (json.dumps(report) + "\n").encode())
        except (BlockingIOError, BrokenPipeError):
            # Full: the keeper is behind, and telling must not slow a step. Broken: it is gone, and so shall we be.
            return
