"""The events and output of a run that this process does not supervise, read from the run folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.jobs.runfolder.rundir import AttemptDir, RunDir
from muster.launch.common.fields import typed_line
from muster.launch.common.follow import LineFollower, as_shown
from muster.launch.common.ranklogs import log_files
from muster.launch.records.event_texts import lines_of
from muster.launch.records.runrows import number
from muster.launch.supervision.console import Console


class RunOutput:
    """The display of a run on a console: its events from byte `offset` on, and the lines of rank 0 (--tee: all ranks).

    `on_row` is called with each event.
    """

    def __init__(
        self,
        run: RunDir,
        console: Console,
        *,
        offset: int,
        on_row: Callable[[dict[str, Any]], None],
    ) -> None:
        self.run, self.console, self.on_row = run, console, on_row
        self._events = LineFollower(run.events, offset=offset)
        self._folder: AttemptDir | None = None
        self._files: dict[tuple[int, str], LineFollower] = {}

    def read(self) -> None:
        """Show everything new since the last call."""
        for line in self._events.poll():
            row = typed_line(line)
            self.on_row(row)
            if row.get("event") in ("attempt", "attempt_ended"):
                self.pass_on(last=True)
            if row.get("event") == "attempt":
                self._folder, self._files = self.run.attempt(number(row.get("attempt")) or 0), {}
            for text in lines_of(row):
                self.console.say(text)
        self.pass_on()

    def pass_on(self, *, last: bool = False) -> None:
        """Show new lines of ranks. `last`: also show an unfinished line at the end of a file."""
        for rank, stream, path in self._logs():
            self._files.setdefault((rank, stream), LineFollower(path))
        for (rank, stream), file in self._files.items():
            lines = [as_shown(line) for line in file.poll()]
            lines += [as_shown(line) for line in file.flush()] if last else []
            self.console.lines(stream, lines, rank)

    def _logs(self) -> list[tuple[int, str, Path]]:
        if self._folder is None or self.console.quiet:
            return []
        if not self.console.tee:
            return [(0, "out", self._folder.out(0)), (0, "err", self._folder.err(0))]
        found = sorted(log_files(self._folder.path), key=lambda each: (each[0], each[1] == "err"))
        return [(rank, stream, self._folder.path / name) for rank, stream, name in found]
