"""The supervisor's two logs in the run folder: one of events as they happen, one of attempts and their verdicts."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

from muster.jobs.basics.files import reserve
from muster.jobs.basics.rowlog import RowLog
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common.processes import start_ticks
from muster.launch.plan.plan import Context
from muster.launch.records.advice import next_step
from muster.launch.records.event_texts import lines_of
from muster.launch.records.verdict import Verdict

RESERVE_BYTES: Final = 1 << 16


class EventLog:
    """The only writer of a run's events.jsonl and attempts.jsonl.

    `say` prints a message when the disk is full; rows then stay in memory until there is space again. Without `say`, a
    full disk is an error. The verdict can always be written, because a small file reserves its space.
    """

    def __init__(self, run: RunDir, say: Callable[[str], None] | None = None) -> None:
        self.run = run
        self._events = RowLog(run.events, patient=False, say=say or print)
        self._attempts = RowLog(run.attempts, patient=say is not None, say=say or print)
        self._say = say or print
        self._may_be_full = say is not None
        self._together: list[dict[str, Any]] | None = None  # rows that are written at the end of a block

    def event(self, event: str, /, **fields: Any) -> None:
        """Append one event.

        Raises:
            RunFolderError, StorageError: if it cannot be written.
        """
        row = {"time": time.time(), "event": event, **fields}
        if self._together is not None:
            self._together.append(row)
            return
        self._events.append([row])
        self._events.patient = self._may_be_full  # an error of the first row is raised, before anything starts

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write the events of a block with one write. Errors as for `event`."""
        rows = self._together = list[dict[str, Any]]()
        try:
            yield
        finally:
            self._together = None
            self._events.append(rows)

    def tell(self, event: str, /, **fields: Any) -> None:
        """Append one event, and print its text (`event_texts`). Errors as for `event`."""
        self.event(event, **fields)
        for line in lines_of({"event": event, **fields}):
            self._say(line)

    def submitted(self, context: Context, transport: str) -> None:
        """Record the requested job and placement, and the supervising process."""
        if self._may_be_full:
            reserve(self.run.reserve, RESERVE_BYTES)
        self.event(
            "submitted",
            run_id=self.run.run_id,
            name=context.job.name,
            kind=context.job.kind,
            nodes=len(context.placement.nodes),
            world_size=context.placement.world_size,
            transport=transport,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_start=start_ticks(os.getpid()),
            grace_s=context.job.grace_s,
        )

    def attempt_ended(
        self, attempt: int, verdict: Verdict, began: float, *, over: float | None = None, **more: Any
    ) -> None:
        """Write the row and the event of an ended attempt."""
        advice = next_step(verdict.name, asdict(verdict.first) if verdict.first else None, verdict.message)
        ended = time.time() if over is None else over
        row = {"attempt": attempt, "started": began, "ended": ended, **verdict.record(), **more, "next_step": advice}
        self._attempts.append([row])
        self.event("attempt_ended", attempt=attempt, **_said(verdict))

    def run_ended(self, attempt: int, verdict: Verdict) -> None:
        """Write the run's last row, into the reserved space if the disk is full."""
        self.event("ended", attempt=attempt, **_said(verdict))
        if self._may_be_full:
            self.run.reserve.unlink(missing_ok=True)
            self._attempts.give_out()
            self._events.give_out()


def _said(verdict: Verdict) -> dict[str, Any]:
    return {"code": verdict.code, "class": verdict.name, "message": verdict.message}
