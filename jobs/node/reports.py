"""Reports of a rank to its parent process: JSON lines over a pipe that was opened before the fork.

    {"report": "arrived"}                               about to join the other ranks
    {"report": "joined"}                                has joined them
    {"report": "replicas", "groups": [[0, 4, 1]], "why": "", "reloads": true}    one of these must live, as [first,
        count, stride], or all ranks reload the state
    {"report": "waiting", "of": 0, "step": 41, "why": "..."}    has left attempt 0, after 41 complete steps, and waits
    {"report": "regrouped", "step": 41, "redone": 1, "source": 0, "seconds": 0.1}    has the state of living ranks
    {"report": "progress", "step": 20, "steps": 196, "loss": 2.1, "rate": 812.0, "unit": "samples/s"}
    {"report": "loaded", "step": 40, "seconds": 0.2, "checkpoint": "step-00000040.a000"}    a checkpoint was loaded
    {"report": "first_step", "step": 41}                the first step of this attempt is done
    {"report": "replayed", "steps": 12, "seconds": 3.1, "compared": 12, "worst": 0.0}       lost steps were repeated
    {"report": "saved", "step": 60, "checkpoint": "step-00000060.a001", "stall_s": 0.03, "seconds": 0.6, "bytes": 9}
    {"report": "missed", "step": 80, "missed": 1, "message": "..."}     a save failed, the first in a row
    {"report": "failed", "kind": "ValueError", "message": "...", "peer": false, "time": 1700000000.0}

A rank that can continue in the next attempt adds its attempt, so that a late report does not count for the next one.

`peer` is true if the failure is a lost connection to another rank. Such a rank is a victim if any other rank failed for
a reason of its own. Without the pipe (torchrun, srun) all reports are dropped. Reports to a full pipe are dropped too,
because reporting must never slow a step. Any rank sends `waiting`, `missed` and `failed`; the other reports after
`joined` come only from rank 0. A program that does not know its number of steps, its loss or its rate omits these in
`progress`.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from muster.jobs.hosts import ranks

LONGEST_KIND: Final = 200  # characters


class Reporter:
    """The write end of a rank's report pipe. Without a pipe, reports are dropped.

    Programs that the rank starts do not inherit the pipe.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.attempt: int | None = None  # of a rank that can continue in the next one, and may report late
        self.descriptor = ranks.inherited(environ, ranks.STATUS_FD)
        if self.descriptor is not None:
            os.set_blocking(self.descriptor, False)
            os.set_inheritable(self.descriptor, False)

    def arrived(self) -> None:
        """Report that this rank is about to join the others."""
        self._send({"report": "arrived"})

    def joined(self) -> None:
        """Report that this rank has joined the others."""
        self._send({"report": "joined"})

    def replicas(self, groups: Sequence[tuple[int, int, int]], why: str, *, reloads: bool) -> None:
        """Report which ranks have copies of the same state, so that one of each group is enough to continue.

        If there are no groups, `why` is the reason. `reloads`: any number of ranks can continue from a checkpoint in
        memory.
        """
        self._send({"report": "replicas", "groups": groups, "why": why, "reloads": reloads})

    def waiting(self, *, of: int, step: int, why: str) -> None:
        """Report that this rank has left attempt `of` with the state after `step` steps, and waits for the next one."""
        self._send({"report": "waiting", "of": of, "step": step, "why": " ".join(why.split())[:500]})

    def regrouped(self, *, step: int, redone: int, source: int, seconds: float) -> None:
        """Report that all ranks have the state after `step` steps, as rank `source` had it.

        `redone`: the number of ranks that were a step behind.
        """
        self._send({"report": "regrouped", "step": step, "redone": redone, "source": source, "seconds": seconds})

    def progress(
        self,
        *,
        step: int,
        steps: int | None = None,
        loss: float | None = None,
        rate: float | None = None,
        unit: str | None = None,
    ) -> None:
        """Report the progress of training. Only rank 0 calls this. Fields that are None are omitted."""
        fields = {"step": step, "steps": steps, "loss": loss, "rate": rate, "unit": unit}
        self._send({"report": "progress", **{name: value for name, value in fields.items() if value is not None}})

    def loaded(self, *, step: int, seconds: float, checkpoint: str) -> None:
        """Report that a checkpoint was loaded; training continues after `step` steps."""
        self._send({"report": "loaded", "step": step, "seconds": seconds, "checkpoint": checkpoint})

    def first_step(self, step: int) -> None:
        """Report that the first step of this attempt is done; `step` counts all steps."""
        self._send({"report": "first_step", "step": step})

    def replayed(self, *, steps: int, seconds: float, compared: int, worst: float) -> None:
        """Report that all lost steps of the earlier attempt have been repeated.

        `compared` of them had a logged loss. `worst` is the largest relative difference from these losses.
        """
        self._send({"report": "replayed", "steps": steps, "seconds": seconds, "compared": compared, "worst": worst})

    def saved(self, *, step: int, checkpoint: str, stall_s: float, seconds: float, nbytes: int) -> None:
        """Report a committed checkpoint: how long training stalled, and how long the whole save took."""
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
        """Report a failed save. `missed` is the number of saves that failed in a row, or 0 if one was only skipped."""
        self._send({"report": "missed", "step": step, "missed": missed, "message": " ".join(message.split())[:500]})

    def failed(self, error: BaseException, *, peer: bool) -> None:
        """Report the error that is about to end this rank, with the current time."""
        message = " ".join(str(error).split())[:500]
        kind = type(error).__name__[:LONGEST_KIND]
        self._send({"report": "failed", "kind": kind, "message": message, "peer": peer, "time": time.time()})

    def _send(self, report: dict[str, Any]) -> None:
        if self.descriptor is None:
            return
        if self.attempt is not None and report["report"] != "failed":
            report["attempt"] = self.attempt
        try:
            os.write(self.descriptor, (json.dumps(report) + "\n").encode())
        except (BlockingIOError, BrokenPipeError):
            # Drop the report: either the pipe is full, and waiting would slow a step, or the parent is gone.
            return
