"""Save while training continues: agree on a step, copy the tensors, hand them to the writer, and follow its progress.

    step ─ step ─ log point ─ copy ─ step ─ step ─ step ─ step      this rank: a save costs it the copy
                      │         └► write ─ sync ─ .ok               its writer process, in parallel
                      └ agreed                  └► commit ─ verify ─ delete old ones         rank 0's writer

All ranks save after the same step, or none does. At a log point each rank reports whether its last save is done, and
rank 0 reports whether the next one is due, in the all-gather that also carries the losses. While a save is in flight,
other saves are skipped. If a writer dies, hangs or finds a full disk, that save is lost. The first save that is lost
with a writer is repeated at the next log point. Three lost saves in a row end the training.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from muster.jobs.basics.errors import RefusedError, StorageError
from muster.jobs.basics.words import spell_ranks
from muster.jobs.checkpoint.commit import IncompleteError
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.checkpoint.writer import SaveOrder
from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.helper import WriterGone, WriterProcess
from muster.jobs.saving.policy import Policy
from muster.jobs.saving.schedule import SaveSchedule

MOST_MISSED: Final = 3
END_TRIES: Final = 2
PATIENCE_S: Final = 30.0  # how long to wait for the writer's answer, in addition to the time for writing the bytes
SLOWEST_BYTES_PER_S: Final = 20e6  # rate of the slowest expected disk
POLL_S: Final = 0.02
NONE: Final = -1


class SavedTensor(Protocol):
    """A tensor, or part of one, that this rank saves."""

    @property
    def piece(self) -> Piece:
        """The piece of the logical tensor."""
        ...


Part = TypeVar("Part", bound=SavedTensor)
Contra = TypeVar("Contra", bound=SavedTensor, contravariant=True)


class Room(Protocol[Contra]):
    """Shared memory for a copy of a rank's parts (`jobs/tensors/snapshot.py`)."""

    pieces: list[Piece]
    offsets: list[int]
    nbytes: int
    descriptor: int

    def take(self, parts: Sequence[Contra]) -> None:
        """Copy the parts."""
        ...

    @property
    def is_complete(self) -> bool:
        """True if the copy is complete."""
        ...

    def wait(self) -> None:
        """Wait until the copy is complete."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class SavingRanks(Protocol):
    """The ranks that save together."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    def meet(self) -> None:
        """Wait until every rank has called this."""
        ...


@dataclass(frozen=True)
class Target:
    """The run and attempt that save, and the checkpoint that the attempt resumed from."""

    run: RunDir
    attempt: int
    began_from: str | None = None
    step: int = 0  # steps done before this attempt
    parent: str | None = None  # the newest checkpoint; `began_from` is None if the state came from living ranks
    # Set if ranks continue in place: the step of the newest checkpoint. `begun`: the newest step that this rank began
    # to save before.
    saved: int | None = None
    begun: int = 0


@dataclass
class InFlight:
    """A save in progress: the writer's order, and the deadline for the writer's next answer (monotonic seconds)."""

    order: SaveOrder
    began_s: float
    stall_s: float
    deadline_s: float
    ordered: bool = False
    reported_skip: bool = False


class NotSaving:
    """The interface that the training loop uses. This implementation saves nothing."""

    # True: continue with a full disk until three saves in a row fail. False: end when a metrics row cannot be written.
    patient = False

    def is_due(self, done: int) -> bool:
        """Return True if a save is due after `done` steps, so that the ranks need a log point there."""
        return False

    def note(self, done: int) -> Sequence[float]:
        """Return the values that this rank shares with the other ranks at a log point."""
        return ()

    def hear(self, done: int, notes: Sequence[Sequence[float]], *, sound: bool = True) -> None:
        """Process the values that the ranks shared (`notes`), which are the same on every rank.

        Nothing is saved unless the loss is finite (`sound`).
        """

    def step_done(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Save if the ranks agreed to save; otherwise check a save in flight."""

    def save(self, done: int, losses: Sequence[tuple[int, float]], *, wait: bool) -> None:
        """Save the state after `done` steps, even if no save is due. Every rank must call this at the same step."""

    def finish(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Wait until the state after the last step, number `done`, is saved."""

    def settle(self) -> None:
        """Wait for the save in flight, then stop saving on this rank. Other ranks may continue to save."""

    def pass_on(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Stop saving on this rank, before other ranks take over its state."""
        self.settle()

    def abandon(self) -> int:
        """Stop saving, and give up the save in flight. Return the newest step that this rank began to save."""
        return 0


class Saver(NotSaving, Generic[Part]):
    """A saver of one rank's part of the state, in step with the savers of all other ranks."""

    patient = True
    noun = "a checkpoint"  # what is skipped if the last save has not ended

    def __init__(
        self,
        target: Target,
        settings: Policy,
        held: Callable[[], Sequence[Part]],
        room: Callable[[Sequence[Part]], Room[Part]],
        world: SavingRanks,
        schedule: SaveSchedule,
        describe: Callable[[int, str | None, Sequence[tuple[int, float]]], Mapping[str, Any]],
        reporter: Reporter,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.target = target
        self.settings = settings
        self.held = held  # function that lists this rank's parts
        self.room = room  # function that allocates memory for a copy of these parts
        self.world = world
        self.schedule = schedule
        self.describe = describe  # function (steps done, parent, losses) -> metadata of a checkpoint
        self.reporter = reporter
        self.patience_s = patience_s
        self.due = schedule.ask(target.step)[1] if settings.every_steps is not None else NONE
        self.begun = target.begun
        self.owed = False  # True: a save was interrupted, or lost with a writer process; rank 0 repeats it at once
        if target.saved is not None:
            self.due = target.step + 1
            self.owed = max(target.begun, schedule.last_due(target.step)) > target.saved
        self.agreed = False
        self.safe = target.step if target.began_from else NONE  # newest step that this rank has saved
        self.parent = target.parent or target.began_from
        self.failed = NONE  # the newest step whose save failed on this rank
        self.missed = 0  # number of failed saves in a row
        self.left_out = 0  # number of skipped saves since the last commit
        self.flight: InFlight | None = None
        self.writer: WriterProcess | None = None
        self.snapshot: Room[Part] | None = None

    # At log points --------------------------------------------------------------------------------------------------

    def is_due(self, done: int) -> bool:
        """Return True if a save is due after `done` steps, so that the ranks need a log point there."""
        return done == self.due

    def note(self, done: int) -> Sequence[float]:
        """Return (is idle, step of the newest failed save, is a save due, step of the next save).

        The last two values count only on rank 0.
        """
        self._look()
        saves, due = self.schedule.ask(done)
        saves = saves or (self.world.rank == 0 and (self.owed or self.target.run.save.exists()))
        return (float(self.flight is None), float(self.failed), float(saves), float(due))

    def hear(self, done: int, notes: Sequence[Sequence[float]], *, sound: bool = True) -> None:
        """Process the values that the ranks shared (`notes`), which are the same on every rank."""
        _, _, saves, due = notes[0]
        busy = [rank for rank, (free, *_) in enumerate(notes) if not free]
        failed = [rank for rank, (_, step, *_) in enumerate(notes) if self.flight and step == self.flight.order.step]
        if failed and self.writer is not None:
            self.writer.give_up(int(notes[failed[0]][1]))  # the failed rank will never write its part
        self.due = int(due)
        self.agreed = bool(saves) and not busy and sound  # a state with a bad loss must not replace good checkpoints
        if saves and busy:
            self._skip(done, busy)
        elif saves and self.world.rank == 0:
            self.owed = False
            self.target.run.save.unlink(missing_ok=True)
        if self.writer is None:
            self._prepare()  # after the first step, when the optimizer has created its state

    def _skip(self, done: int, busy: list[int]) -> None:
        self.left_out += 1
        if self.world.rank == 0 and self.flight is not None and not self.flight.reported_skip:
            self.flight.reported_skip = True
            text = (
                f"skipped {self.noun}: the save of step {self.flight.order.step} is still being written "
                f"on {spell_ranks(busy[:8])}"
            )
            self.reporter.missed(step=done, missed=0, message=text)

    # A save ---------------------------------------------------------------------------------------------------------

    def step_done(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Save if the ranks agreed to save; otherwise check a save in flight."""
        if self.agreed:
            self.agreed = False
            self._save(done, losses)
            if self.settings.blocking:
                self._wait()
        elif self.flight is not None:
            self._look()

    def save(self, done: int, losses: Sequence[tuple[int, float]], *, wait: bool) -> None:
        """Save the state after `done` steps once the previous save is done; with `wait`, also wait for this one."""
        self.agreed = False
        self._wait()
        self._save(done, losses)
        if wait:
            self._wait()

    def settle(self) -> None:
        """Wait for the save in flight, then stop saving on this rank. Other ranks may continue to save."""
        self._wait()
        self.close()

    def finish(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        """Wait until the state after the last step, number `done`, is saved.

        Raises:
            StorageError: if the state cannot be saved.
        """
        tries = 0
        self._wait()
        while self.safe != done:
            if tries == END_TRIES:
                raise StorageError(
                    f"{self.target.run.checkpoints}: the state after step {done} could not be saved; the last valid "
                    f"checkpoint: {self.parent or 'none'}; repair the storage, then: "
                    f"{self.target.run.command('resume')}"
                )
            tries += 1
            self._save(done, losses)
            self._wait()
        self.close()
        # Wait for rank 0's commit, because an early exit could look like a failure and stop the other ranks.
        page.own.enter(Phase.SAVE)
        self.world.meet()

    def abandon(self) -> int:
        """Stop saving, and give up the save in flight. Return the newest step that this rank began to save."""
        self.close()
        return self.begun

    def close(self) -> None:
        """End the writer and free the memory."""
        if self.writer is not None:
            self.writer.end()
        if self.snapshot is not None:
            self.snapshot.close()
        self.writer = self.snapshot = None

    def _prepare(self) -> None:
        """Start the writer, and allocate memory for the copy."""
        parts = self.held()
        if self.writer is None:
            self.writer = WriterProcess()
        if self.snapshot is None or [part.piece for part in parts] != self.snapshot.pieces:
            if self.snapshot is not None:
                self.snapshot.close()
            self.snapshot = self.room(parts)

    def _save(self, done: int, losses: Sequence[tuple[int, float]]) -> None:
        began_s, self.begun = time.perf_counter(), done
        parts = self.held()
        if self.writer is None or self.snapshot is None or [part.piece for part in parts] != self.snapshot.pieces:
            self._prepare()
        assert self.snapshot is not None
        self.snapshot.take(parts)
        order = self._order(done, losses, self.snapshot)
        now_s, wait_s = time.monotonic(), self._patience(self.snapshot.nbytes)
        self.flight = InFlight(order, now_s, 0.0, now_s + wait_s)
        self._look()
        if self.flight is not None:
            self.flight.stall_s = time.perf_counter() - began_s

    def _order(self, done: int, losses: Sequence[tuple[int, float]], snapshot: Room[Part]) -> SaveOrder:
        return SaveOrder(
            run=str(self.target.run.path),
            step=done,
            attempt=self.target.attempt,
            writer=self.world.rank,
            writers=self.world.size,
            pieces=list(zip(snapshot.pieces, snapshot.offsets, strict=True)),
            meta=self.describe(done, self.parent, losses) if self.world.rank == 0 else None,
            wait_s=2 * self._patience(snapshot.nbytes),
            keep=self.settings.keep,
            protect=self.target.began_from,
        )

    def _patience(self, nbytes: int) -> float:
        return self.patience_s + nbytes / SLOWEST_BYTES_PER_S

    # The outcome of a save ------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until no save is in flight. Each answer of the writer has a timeout."""
        if self.flight is None:
            return
        page.own.enter(Phase.SAVE)
        if self.snapshot is not None:
            self.snapshot.wait()
        while self.flight is not None:
            self._look(wait_s=POLL_S)
            page.own.beat()
        page.own.enter(Phase.RUN)

    def _look(self, *, wait_s: float = 0.0) -> None:
        """Send the order once the copy is complete, process the writer's messages, and end a writer that is silent."""
        flight = self.flight
        if flight is None or self.snapshot is None or not self.snapshot.is_complete:
            return
        try:
            if self.writer is None:
                self.writer = WriterProcess()
            if not flight.ordered:
                self.writer.order(flight.order, self.snapshot.descriptor)
                flight.ordered = True
            for message in self.writer.messages(wait_s=wait_s):
                self._process_message(flight, message)
        except WriterGone:
            self._lose_writer("the writer process has ended")
        if self.flight is flight and time.monotonic() >= flight.deadline_s:
            waited_s = time.monotonic() - flight.began_s
            self._lose_writer(f"the writer process has not answered for {waited_s:.0f} s")

    def _process_message(self, flight: InFlight, message: Mapping[str, Any]) -> None:
        did, now_s = message["did"], time.monotonic()
        flight.deadline_s = now_s + self._patience(message.get("bytes", 0))
        if did == "shard":
            flight.deadline_s += flight.order.wait_s if self.world.rank == 0 else 0.0
        elif did == "commit":
            self._committed(flight, message["checkpoint"], message["bytes"])
        elif did == "all":
            self.safe, self.missed, self.flight = flight.order.step, 0, None
        elif did == "nothing":
            if message["kind"] == "FencedError":
                raise RefusedError(message["message"])
            self._miss(flight, message["message"], by_writer=message["kind"] == IncompleteError.__name__)

    def _committed(self, flight: InFlight, checkpoint: str, nbytes: int) -> None:
        seconds = time.monotonic() - flight.began_s
        self.parent = checkpoint
        self.schedule.measured(stall_s=flight.stall_s, save_s=seconds)
        after = f", after skipping {self.left_out}" if self.left_out else ""
        self.left_out = 0
        cost = f"{nbytes / 2**20:.1f} MB in {seconds:.2f} s, stall {1e3 * flight.stall_s:.1f} ms"
        with suppress(OSError):
            print(f"saved {checkpoint}  {cost}{after}", flush=True)
        self.reporter.saved(
            step=flight.order.step, checkpoint=checkpoint, stall_s=flight.stall_s, seconds=seconds, nbytes=nbytes
        )

    def _lose_writer(self, why: str) -> None:
        assert self.flight is not None
        if self.writer is not None:
            self.writer.end()
        self.writer = None
        self._miss(self.flight, why, by_writer=True)

    def _miss(self, flight: InFlight, message: str, *, by_writer: bool) -> None:
        """Count a failed save. `by_writer`: the writer of a rank is gone, but the storage may be sound.

        Raises:
            StorageError: if this is the third failed save in a row.
        """
        step = flight.order.step
        self.flight, self.failed = None, step
        self.missed += 1
        self.owed = by_writer and self.missed == 1  # a writer that dies again leaves time until the next save is due
        with suppress(OSError):  # standard error may be on the disk that is full
            print(f"muster: step {step} was not saved ({self.missed} in a row): {message}", file=sys.stderr, flush=True)
        self.reporter.missed(step=step, missed=self.missed, message=message)
        if self.missed >= MOST_MISSED:
            raise StorageError(f"{self.missed} saves in a row failed; the last: {message}")
