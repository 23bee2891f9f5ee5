"""The display of a measurement in progress, on standard error: a growing table on a terminal, plain lines elsewhere.

A thread reads the run's bench.jsonl four times a second. This works no matter which process supervises the run.
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
    """The display of one run while it measures, from the records in its newest attempt's bench.jsonl."""

    def __init__(self, run: RunDir, of: Format[Any, Any]) -> None:
        self.run = run
        self._format = of
        self._attempt = -1
        self._file: LineFollower | None = None
        self.forget()

    def poll(self) -> list[Any]:
        """Process and return the records written since the last call. A new attempt resets the view."""
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
        """Forget all records."""

    @abstractmethod
    def take(self, record: Any) -> None:
        """Process one record."""

    @abstractmethod
    def line_of(self, record: Any) -> str | None:
        """Return the plain line for a record, if it has one."""

    @abstractmethod
    def table(self, width: int) -> "Group | None":
        """Return the results so far, for a terminal of `width` columns; None before there are any."""


class BenchConsole(Console):
    """The console of a measurement. It hides rank 0's standard output, because the report is printed at the end."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._drawing = threading.Lock()  # one thread draws the table, and another one prints the final result
        self._ended = False
        self.finish: Callable[[], None] = self.hide  # called before the final result is printed

    def plan(self, run_path: str, nodes: list[NodePlan], master: str) -> None:
        """Print the run's folder. The result's header names the hosts."""
        self.say(f"run {run_path}")

    def lines(self, stream: str, lines: Sequence[str], rank: int = 0) -> None:
        """Show rank 0's standard error. The report replaces its standard output."""
        if stream == "err":
            super().lines(stream, lines, rank)

    def progress(self, report: Mapping[str, Any]) -> None:
        """Show no progress line, because a measurement has no steps."""

    def show(self, table: "Group") -> None:
        """Draw the table below all lines, or update it; do nothing once the run has ended."""
        with self._drawing:
            if self._ended or not self._terminal:
                return
            if self._progress is None:
                from rich.live import Live

                self._progress = Live(console=screen.live(), auto_refresh=False, transient=True, redirect_stdout=False)
                self._progress.start()
            self._progress.update(table, refresh=True)

    def end(self, verdict: Verdict, seconds: float, run: RunDir, next_step: str) -> None:
        """Remove the table, and print how the run ended. After a stop, the measurements so far are kept and shown."""
        self.finish()
        super().end(verdict, seconds, run, "" if verdict.code == exits.STOPPED else next_step)

    def hide(self) -> None:
        """Remove the table for good."""
        with self._drawing:
            self._ended = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    @property
    def draws(self) -> bool:
        """True if standard error is a terminal."""
        return self._terminal

    @property
    def width(self) -> int:
        """The terminal's width in columns."""
        return shutil.get_terminal_size().columns


@contextmanager
def watching(view: View, console: BenchConsole) -> Iterator[None]:
    """Show a run's records until the `with` block ends or the console prints the run's end."""
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
    """Process new records and show them. The table is redrawn only after a change, to save CPU time for the ranks."""
    new = view.poll()
    if console.draws:
        if new and (table := view.table(console.width)) is not None:
            console.show(table)
        return
    for record in new:
        if (line := view.line_of(record)) is not None:
            console.say(line)
