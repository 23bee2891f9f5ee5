"""A measurement as it goes on, on standard error: on a terminal a table that fills, else plain lines.

A thread reads the run's bench.jsonl four times a second, the same way whoever supervises the run, and wherever.
"""

import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics import exits
from muster.jobs.measuring.recorded import Format
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import screen
from muster.launch.common.follow import LineFollower
from muster.launch.plan.plan import NodePlan
from muster.launch.records.verdict import Verdict
from muster.launch.supervision.console import Console

if TYPE_CHECKING:
    from rich.console import Group

POLL_S: Final = 0.25


class View(ABC):
    """What is shown of a run while it measures, from the records in the bench.jsonl of its newest attempt."""

    def __init__(self, run: RunDir, of: Format[Any, Any]) -> None:
        self.run = run
        self._format = of
        self._attempt = -1
        self._file: LineFollower | None = None
        self.forget()

    def poll(self) -> list[Any]:
        """Take in what came since the last call, and return its records; a new attempt begins anew."""
        newest = max(self.run.attempt_numbers(), default=-1)
        if newest != self._attempt:
            self._attempt, self._file = newest, LineFollower(self.run.attempt(newest).bench)
            self.forget()
        lines = self._file.poll() if self._file is not None else ()
        records = [record for line in lines if (record := self._format.parse(line)) is not None]
        for record in records:
            self.take(record)
        return records

    @abstractmethod
    def forget(self) -> None:
        """Begin without records."""

    @abstractmethod
    def take(self, record: Any) -> None:
        """Take in a record."""

    @abstractmethod
    def line_of(self, record: Any) -> str | None:
        """Return the plain line that a record is worth."""

    @abstractmethod
    def table(self, width: int) -> "Group | None":
        """Return what is known so far, for a terminal of so many columns; None before there is anything."""


class BenchConsole(Console):
    """The console of a measurement: what rank 0 prints is shown in the end by us, and only there."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._drawing = threading.Lock()  # the table is drawn by a thread, the end is said by another
        self._ended = False
        self.finish: Callable[[], None] = self.hide  # what is to be done before the end is said

    def plan(self, run_path: str, nodes: list[NodePlan], master: str) -> None:
        """Name the run's folder; the result's header names the hosts."""
        self.say(f"run {run_path}")

    def lines(self, stream: str, lines: Sequence[str], rank: int = 0) -> None:
        """Pass on what rank 0 says on standard error; its table is printed when all has been measured."""
        if stream == "err":
            super().lines(stream, lines, rank)

    def progress(self, report: Mapping[str, Any]) -> None:
        """Draw no progress line: there are no steps."""

    def show(self, table: "Group") -> None:
        """Draw the table below all lines, or draw it anew; nothing once the run has ended."""
        with self._drawing:
            if self._ended or not self._terminal:
                return
            if self._progress is None:
                from rich.live import Live

                self._progress = Live(console=screen.live(), auto_refresh=False, transient=True, redirect_stdout=False)
                self._progress.start()
            self._progress.update(table, refresh=True)

    def end(self, verdict: Verdict, seconds: float, run: RunDir, next_step: str) -> None:
        """Take the table away, and say how it ended; of a run that was stopped, what was measured is kept and shown."""
        self.finish()
        super().end(verdict, seconds, run, "" if verdict.code == exits.STOPPED else next_step)

    def hide(self) -> None:
        """Take the table away for good."""
        with self._drawing:
            self._ended = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    @property
    def draws(self) -> bool:
        """True where there is a terminal to draw on."""
        return self._terminal

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return shutil.get_terminal_size().columns


@contextmanager
def watching(view: View, console: BenchConsole) -> Iterator[None]:
    """Show what comes of a run for as long as the block within goes on, or until the console says the run's end."""
    over = threading.Event()
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            while not over.wait(POLL_S):
                show(view, console)
        except BaseException as error:
            failures.append(error)

    def finish() -> None:
        if not over.is_set():
            over.set()
            thread.join()
            console.hide()
            show(view, console)

    thread = threading.Thread(target=watch, name="bench-watch", daemon=True)
    console.finish = finish
    thread.start()
    try:
        yield
    finally:
        finish()
    if failures:
        raise failures[0]


def show(view: View, console: BenchConsole) -> None:
    """Take in what is new, and show it; what has not changed is not drawn again, for the ranks want the cores."""
    new = view.poll()
    if console.draws:
        if new and (table := view.table(console.width)) is not None:
            console.show(table)
        return
    for record in new:
        if (line := view.line_of(record)) is not None:
            console.say(line)
