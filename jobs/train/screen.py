"""Rank 0's display of training: plain lines on standard output, and a progress line on a terminal."""

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from muster.jobs.hosts import ranks
from muster.jobs.node.reports import Reporter
from muster.jobs.train.metrics import LogSummary
from muster.jobs.world.world import World

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from typing_extensions import Self


class Screen:
    """The output of training progress on rank 0: as text, and to the rank parent if there is one."""

    def __init__(self, world: World, reporter: Reporter, steps: int, *, patient: bool = False) -> None:
        self.speaks = world.rank == 0
        self.patient = patient  # True: continue if standard output is on a full disk
        self.reporter = reporter
        self.steps = steps
        self.warned = False  # the warning is printed once, because later losses will not be finite either
        self.progress: Progress | None = None
        self.task: TaskID | None = None

    def __enter__(self) -> "Self":
        # Under a rank parent, standard error is a file. Without one, it may be a terminal.
        if self.speaks and ranks.STATUS_FD not in os.environ and sys.stderr.isatty():
            self._open_progress()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if not self.speaks:
            return
        try:
            print(text, flush=True)
        except OSError:  # the text stays buffered, and is written once there is space
            if not self.patient:
                raise

    def first_step(self, done: int) -> None:
        """Report that this attempt has completed its first step."""
        if self.speaks:
            self.reporter.first_step(done)

    def step(self, summary: LogSummary) -> None:
        """Show a log point."""
        if not self.speaks:
            return
        if summary.broken is not None and not self.warned:
            self.warned = True
            self.say(f"loss is not finite at step {summary.broken}: lower train.optimizer.lr, or set train.clip_norm")
        rate = f"{summary.rate:.0f}" if summary.rate >= 100 else f"{summary.rate:.3g}"
        width = len(str(self.steps))
        self.say(
            f"step {summary.step:>{width}}/{self.steps}  epoch {summary.epoch}  loss {summary.loss:.6f}  "
            f"{rate} {summary.unit}/s"
        )
        self.reporter.progress(
            step=summary.step, steps=self.steps, loss=summary.loss, rate=summary.rate, unit=f"{summary.unit}/s"
        )
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=summary.step, loss=f"loss {summary.loss:.4f}")

    def _open_progress(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),
            transient=True,
        )
        self.progress.start()
        self.task = self.progress.add_task("steps", total=self.steps, loss="")
