"""Save the state into the memory of the nodes, often, beside the checkpoints on disk.

    rank      copy ─► writer: shard-00002, .ok in a folder in memory ───────────────► "all"    the next one may begin
    agent                       └► copy to another node ─► all nodes have theirs ─► COMPLETE, delete the older one

The folder has the form of `checkpoints/` in a run folder, with the shards of this node's ranks and of another node's.
Its owner is the agent of the node (`launch/node/copies.py`), so it outlives the ranks. Nobody writes a manifest until a
restart needs the checkpoint. A failed copy costs nothing but that copy.

After a restart a rank reads its node's shards from the folder, and all others from the nodes that have them
(`jobs/checkpoint/remote.py`).
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from muster.jobs.checkpoint.writer import SaveOrder
from muster.jobs.hosts import ranks
from muster.jobs.node import page
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.policy import PlainPolicy
from muster.jobs.saving.saver import NONE, POLL_S, InFlight, NotSaving, Part, Room, Saver
from muster.jobs.saving.schedule import SaveSchedule

TELL_S: Final = 60.0  # between two reports of failed copies in a row
NOTES: Final = 4  # values that a `Saver` shares at a log point


def memory_run() -> RunDir | None:
    """Return the folder in this node's memory; None if its agent keeps none."""
    path = os.environ.get(ranks.MEMORY)
    return RunDir(Path(path)) if path else None


class MemorySaver(Saver[Part]):
    """A saver whose target is the folder in memory. It never ends the training, and is not waited for."""

    noun = "a copy in memory"
    _failing_since = _told_at = 0.0  # when the first of the failed copies began, and when one was last reported
    written = NONE  # the newest step whose shard this rank's writer has written

    def save(self, done: int, losses: Sequence[tuple[int, float]], *, wait: bool) -> None:
        """Do nothing: the save on disk, which the caller wants, is newer than any copy."""

    def settle(self) -> None:
        """Stop saving on this rank."""
        self.close()

    def pass_on(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Copy the state after `done` steps into this node's memory, for the ranks of the next attempt. Then stop."""
        if self.flight is None or self.flight.order.step != done:
            self._wait()
        if self.safe != done:
            if self.flight is None:
                self._save(done, losses)
            while self.flight is not None and self.written != done:
                self._look(wait_s=POLL_S)
                page.own.beat()
        self.close()

    def finish(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Stop saving. The state after the last step is saved on disk."""
        self.close()

    def _order(self, done: int, losses: Sequence[tuple[int, float]], snapshot: Room[Part]) -> SaveOrder:
        return replace(super()._order(done, losses, snapshot), memory=True)

    def _process_message(self, flight: InFlight, message: Mapping[str, Any]) -> None:
        if message["did"] == "nothing" and message["kind"] == "IncompleteError":  # another rank failed, and reports it
            self.flight, self.failed = None, flight.order.step
            return
        super()._process_message(flight, message)
        if message["did"] == "shard":  # every rank waits for the others
            self.written = flight.order.step
            flight.deadline_s += flight.order.wait_s

    def _miss(self, flight: InFlight, message: str, *, by_writer: bool) -> None:
        """Report the first of several failed copies in a row, and then every TELL_S for how long none has succeeded."""
        self.flight, self.failed, now = None, flight.order.step, time.monotonic()
        self.missed += 1
        if self.missed == 1:
            self._failing_since = flight.began_s
        elif now < self._told_at + TELL_S:
            return
        self._told_at = now
        text = "a copy in memory has failed"
        if self.missed > 1:
            text = f"no copy in memory has succeeded for {now - self._failing_since:.0f} s ({self.missed} in a row)"
        with suppress(OSError):
            print(f"muster: step {self.failed} was not copied into memory: {message}", flush=True)
        self.reporter.missed(step=self.failed, missed=0, message=f"{text}: {message}")


def with_copies(saver: Saver[Part], memory: RunDir | None) -> NotSaving:
    """Also copy the state into the memory of the nodes, if the settings of `saver` say how often."""
    if (every := saver.settings.memory_every_steps) is None:
        return saver
    if memory is None:
        if saver.world.rank == 0:
            print("checkpoint.memory_every_steps has no effect, because no agent of Muster started the ranks")
        return saver
    often, target = PlainPolicy(every_steps=every), replace(saver.target, run=memory, began_from=None, saved=None)
    schedule = SaveSchedule(often, target.step)
    common = (saver.held, saver.room, saver.world, schedule, saver.describe, saver.reporter)
    return SavesTwice(saver, MemorySaver(target, often, *common))


class SavesTwice(NotSaving):
    """Save on disk and into memory, each by its own schedule."""

    patient = True

    def __init__(self, disk: NotSaving, memory: NotSaving) -> None:
        self.disk = disk
        self.memory = memory

    def is_due(self, done: int) -> bool:
        """Return True if one of the saves is due after `done` steps."""
        return self.disk.is_due(done) or self.memory.is_due(done)

    def note(self, done: int) -> Sequence[float]:
        """Return the values of both, those of the disk first."""
        return (*self.disk.note(done), *self.memory.note(done))

    def hear(self, done: int, notes: Sequence[Sequence[float]], *, sound: bool = True) -> None:
        """Process the values that the ranks shared."""
        self.disk.hear(done, [each[:NOTES] for each in notes], sound=sound)
        self.memory.hear(done, [each[NOTES:] for each in notes], sound=sound)

    def step_done(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Save as agreed."""
        self.disk.step_done(done, losses)
        self.memory.step_done(done, losses)

    def save(self, done: int, losses: Sequence[tuple[int, float]], *, wait: bool) -> None:
        """Save on disk, even if no save is due."""
        self.disk.save(done, losses, wait=wait)

    def finish(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Wait until the state after the last step is on disk."""
        self.memory.finish(done, losses)
        self.disk.finish(done, losses)

    def settle(self) -> None:
        """Wait for the save in flight on disk, then stop saving on this rank."""
        self.memory.settle()
        self.disk.settle()

    def pass_on(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Copy the state into the memory of the nodes, for the ranks of the next attempt. Stop saving on this rank."""
        self.memory.pass_on(done, losses)
        self.disk.settle()

    def abandon(self) -> int:
        """Stop saving, and give up the saves in flight. Return the newest step that this rank began to save on disk."""
        self.memory.abandon()
        return self.disk.abandon()
