"""`muster.session()`: checkpoints, logging and clean stops for a user's own training loop, however it was started.

    run = muster.session()
    state = run.state(model=model, optimizer=optimizer)
    for step in run.steps(10_000, state):        # restores first, saves when due, stops cleanly when asked to
        loss = train_step(...)
        run.log(loss=loss, tokens=batch.numel())

Under `muster run` the session writes to the run's folder, and the run's supervisor watches it. Under torchrun, srun or
alone, rank 0 creates a run folder. Only the standard library is imported until tensors are registered.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.basics.files import folder_error
from muster.jobs.node import page
from muster.jobs.node.page import Phase
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.direct import FAILED, ending_of, write_end
from muster.jobs.session import starting
from muster.jobs.session.endings import ProgramEnd
from muster.jobs.session.log import SessionLog, logger_of
from muster.jobs.session.loop import Loop
from muster.jobs.session.order import is_in_order, order_of, replayed
from muster.jobs.session.place import RankPlace
from muster.jobs.session.reading import Restored, restore
from muster.jobs.session.sampler import Sampler, samples_of
from muster.jobs.session.together import agree

if TYPE_CHECKING:
    import torch

    from muster.jobs.session.state.state import State
    from muster.jobs.world.world import World

Batch = TypeVar("Batch")


class Session:
    """One rank's session.

    Attributes: `rank`, `world_size`, `local_rank`, `is_main` (True on rank 0), `logger` (level INFO on rank 0, WARNING
    on the other ranks), `name` (the run's).
    """

    def __init__(self, place: RankPlace, *, runs: str | None, tensorboard: bool) -> None:
        self.place = place
        self.rank = place.env.rank
        self.world_size = place.env.world_size
        self.local_rank = place.env.local_rank
        self.is_main = self.rank == 0
        self.name = place.name
        self.logger = logger_of(self.rank)
        self._runs = runs
        self._tensorboard = tensorboard
        self._began = time.time()
        self._reporter = Reporter(os.environ)
        self._loop_made: Loop | None = None
        self._error: BaseException | None = None
        self.end = ProgramEnd()
        self._samplers: list[Sampler] = []
        self._joined: State | None = None
        self._is_closed = False

    # Device and folders -----------------------------------------------------------------------------------------------

    @property
    def device(self) -> "torch.device":
        """This rank's device: its own GPU, the node's only GPU, or the CPU if the node has none.

        Raises:
            RefusedError: if the node has several GPUs, but more ranks than GPUs.
        """
        import torch

        count = torch.cuda.device_count()
        if count == 0:
            return torch.device("cpu")
        if self.local_rank >= count and count > 1:
            raise RefusedError(
                f"session: rank {self.rank} has local rank {self.local_rank}, but its node has only {count} GPUs; "
                "start fewer ranks per node"
            )
        return torch.device("cuda", self.local_rank % count)

    @property
    def folder(self) -> Path:
        """The run folder."""
        if self._loop_made is None and self.place.run is not None:
            return self.place.run.path
        return self._loop.start.run.path

    def path(self, name: str) -> Path:
        """Return the path of a file that belongs to the run and survives restarts: `<run>/files/<name>`.

        Raises:
            RefusedError: if the name leads out of that folder.
        """
        files = self.folder / "files"
        path = Path(os.path.normpath(files / name))
        if not path.is_relative_to(files) or path == files:
            raise RefusedError(
                f"run.path: {name!r} is not a path inside the run's folder of files; pass one such as plots/loss.png"
            )
        make_folders(path.parent)
        return path

    def barrier(self) -> None:
        """Wait until every rank has called this: a collective."""
        self._loop.ranks.meet()

    # State ----------------------------------------------------------------------------------------------------------

    def state(self, **objects: Any) -> "State":
        """Register the state to save and restore: objects with `state_dict` and `load_state_dict`, and plain values.

        Plain values are read and set as attributes of the result: `state.best = min(state.best, loss)`.

        Raises:
            RefusedError: if something cannot be stored; the message names it.
        """
        from muster.jobs.session.state.state import State

        return State(objects)

    def restore(self, state: "State") -> int:
        """Fill the state from the newest valid checkpoint, if there is one; return the steps done: a collective."""
        return self._restore(state).step

    def save(self, state: "State", step: int, *, wait: bool = False) -> None:
        """Save after `step` steps, in loops without `run.steps`: a collective. `wait`: return only after the commit.

        If the run was asked to stop, this call saves and then ends the program.

        Raises:
            RefusedError: if `step` is not larger than at the last save.
        """
        loop = self._loop
        if not loop.is_under_way:
            self._begin(state, Restored(loop.done))
        loop.save(step, wait=wait)

    def sampler(
        self, dataset: Sized | int, batch_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> Sampler:
        """Return a DataLoader's `batch_sampler` that divides a data set among ranks, `batch_size` samples for each.

        Register it in the state. A resume on any number of ranks then continues with the remaining samples.
        """
        sampler = Sampler(
            samples_of(dataset),
            batch_size,
            rank=self.rank,
            ranks=self.world_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self._samplers.append(sampler)
        return sampler

    # Loops ----------------------------------------------------------------------------------------------------------

    def steps(self, total: int, state: "State | None" = None, *, log_every: int | None = None) -> Iterator[int]:
        """Yield the remaining steps of `total`, counted from 0, on every rank.

        Restore the state first, save it when due and after the last step, and end the program cleanly when the run is
        asked to stop. `log_every`: number of steps from one printed line to the next (default: print every 5 seconds).
        """
        loop = self._open(state, log_every)
        loop.steps = total
        while loop.done < total:
            step = loop.done
            loop.before_step()
            yield step
            if loop.done != step:
                raise RefusedError(
                    f"run.steps: step {step} was counted twice; use run.save only in loops without run.steps"
                )
            loop.step_done()
        loop.finish()

    def epochs(self, total: int, state: "State | None" = None, *, log_every: int | None = None) -> Iterator[int]:
        """Yield the remaining epochs of `total`, counted from 0. Iterate over an epoch's batches with `batches`.

        An interrupted epoch is yielded again, with its remaining batches.
        """
        loop = self._open(state, log_every)
        for epoch in range(loop.progress.get("epoch", 0), total):
            if loop.progress.get("epoch") != epoch:
                loop.progress = {"epoch": epoch, "batch": 0}
            for sampler in self._samplers:
                sampler.set_epoch(epoch)
            loop.epochs = total
            yield epoch
        loop.finish()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the remaining batches of this epoch; each is a step.

        With a sampler of `run.sampler`, the loader itself begins where the epoch was interrupted. From any other
        loader, the batches done before are read again and dropped. The random number generators that decide their order
        begin as at the start of the epoch (`jobs/session/order.py`). If its sampler has `set_epoch`, that is called.
        """
        loop = self._loop
        epoch, first = loop.progress.get("epoch", 0), loop.progress.get("batch", 0)
        driver = getattr(loader, "batch_sampler", None)
        ours = driver if isinstance(driver, Sampler) else None
        with suppress(TypeError):  # a DataLoader of an IterableDataset may have no length
            if isinstance(loader, Sized) and loop.epochs is not None:
                loop.steps = loop.done - first + (loop.epochs - epoch) * len(loader)
        if ours is not None and ours.is_done:
            return
        if ours is None and callable(set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None)):
            set_epoch(epoch)
        batches = iter(loader) if ours is not None else self._in_order(loader, epoch, first)
        for number, batch in enumerate(batches, first):
            loop.before_step()
            yield batch
            loop.progress = {"epoch": epoch, "batch": number + 1}
            loop.step_done()
        page.own.enter(Phase.EVALUATE)  # the program may spend long on an evaluation before the next epoch

    def _in_order(self, loader: Iterable[Batch], epoch: int, first: int) -> Iterator[Batch]:
        """Begin an epoch of a loader, and drop its first batches if they were done before."""
        state = self._loop.state
        if first == 0 or state is None:
            if state is not None:
                state.begin_epoch(order_of(loader))
            return iter(loader)
        if state.epoch_order is not None:
            return replayed(loader, first, state.epoch_order)
        if self.is_main and not is_in_order(loader):
            print(
                f"muster: epoch {epoch}: samples may be used twice or not at all, because the checkpoint does not have "
                f"the order of the samples for {self.world_size} ranks; run.sampler repeats it on any number of ranks",
                file=sys.stderr,
                flush=True,
            )
        return islice(loader, first, None)

    def log(self, **values: Any) -> None:
        """Log numbers of the current step to metrics.jsonl, the terminal, and TensorBoard if enabled.

        `tokens` and `samples` are summed over the ranks and give the rate; all other values are averaged. Tensors of
        one element are read later, when the ranks synchronize, so logging does not wait for the device. Between two
        steps, rank 0's values are written at once, as an evaluation.
        """
        loop = self._loop
        if loop.in_step:
            loop.log.add(values)
        else:
            loop.log.evaluation(loop.done, values)

    # Begin and end ----------------------------------------------------------------------------------------------------

    @property
    def _loop(self) -> Loop:
        """The loop, created on first use. The first use is a collective."""
        if self._is_closed:
            raise RefusedError("session: it has already ended; use it before the program ends")
        if self._loop_made is None:
            page.own.enter(Phase.START)
            ranks = agree(self.place.env)
            start = starting.start(self.place, ranks, self._runs, self._began)
            make_folders(start.run.attempt(start.attempt).path)
            if ranks.size > 1:
                self._reporter.joined()
            self._loop_made = Loop(
                self.place, start, ranks, SessionLog(start.run, start.attempt, ranks), self._reporter
            )
            if self._tensorboard and self.is_main:
                from muster.jobs.world.tensorboard import EventFiles

                events = EventFiles(start.run.path, "tensorboard=True")
                self._loop_made.show = lambda news: events.write(news.logged)
        return self._loop_made

    def _restore(self, state: "State") -> Restored:
        loop = self._loop
        self._join(state)
        restored = restore(loop.start, state, loop.ranks)
        loop.done = restored.step
        if restored.loaded is not None and self.is_main:
            loaded = restored.loaded
            self._reporter.loaded(step=loaded.step, seconds=loaded.seconds, checkpoint=loaded.checkpoint)
            resume = loop.start.resume
            source = " in the memory of the nodes" if resume is not None and resume.memory else ""
            print(f"continues from {loaded.checkpoint}{source}, read in {loaded.seconds:.2f} s", flush=True)
            for line in state.notes:
                print(line, flush=True)
        return restored

    def _open(self, state: "State | None", log_every: int | None) -> Loop:
        """Begin a loop.

        Raises:
            RefusedError: if another loop is active.
        """
        loop = self._loop
        if loop.is_under_way:
            raise RefusedError("session: a loop of run.steps or run.epochs is active; end it before starting another")
        restored = Restored(loop.done) if state is None or loop.has_begun else self._restore(state)
        self._begin(state, restored)
        loop.log_every = log_every
        return loop

    def _begin(self, state: "State | None", restored: Restored) -> None:
        loop = self._loop
        if state is not None:
            self._join(state)
            if not self.place.saves and self.is_main:
                print(
                    "muster: nothing is saved, because the nodes share no run folder; name shared storage with --runs",
                    flush=True,
                )
        loop.samplers = self._samplers
        loop.begin(state, restored)

    def _join(self, state: "State") -> None:
        """Check a state on all ranks, once: a collective."""
        loop = self._loop
        if state is self._joined:
            return
        loop.device = self.device if state.has_tensors else None
        state.join(cast("World", loop.ranks.world or loop.ranks), loop.device)
        self._joined = state

    def steps_done(self) -> int | None:
        """Return the number of steps done; None before the first loop."""
        return self._loop_made.done if self._loop_made is not None and self._loop_made.has_begun else None

    def failed(self, error: BaseException) -> None:
        """Record the exception that ends the program, and end the session."""
        self._error = error
        self.close()

    def close(self) -> None:
        """End the session with the program: wait for a save in flight; without a supervisor, record the outcome."""
        loop = self._loop_made
        if loop is None or self._is_closed:
            return
        self._is_closed = True
        self._error = self._error or self.end.error()
        try:
            if self._error is None:
                loop.settle()
        except MusterError as error:
            self._error = error
            raise
        finally:
            if loop.start.direct and self.is_main:
                code, message = self._outcome(loop.stopped_with)
                write_end(loop.start.run, loop.start.attempt, self._began, code, message)
        if self._error is None:
            ranks = loop.ranks
            self._loop_made = self._joined = loop = None  # references to a process group would keep its threads alive
            self._samplers.clear()
            ranks.close()

    def _outcome(self, stopped_with: int) -> tuple[int, str]:
        """Return the exit code and the message of the run. `stopped_with`: the exit code after a stop, else 0."""
        if stopped_with:
            return stopped_with, exits.class_of(stopped_with)
        if self._error is not None:
            return ending_of(self._error)
        if self.end.seen:
            return ending_of(SystemExit(self.end.status))
        if self.end.ran_through():
            return exits.DONE, "done"
        return FAILED, "rank 0 did not say how it ended; its exit code is not known"


def make_folders(path: Path) -> None:
    """Create a folder of a run and its missing parents.

    Raises:
        RunFolderError, StorageError: if it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise folder_error(path, error) from error
