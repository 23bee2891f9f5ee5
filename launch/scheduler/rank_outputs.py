"""What ranks print in a run that this process does not supervise: read from their logs in the run folder."""

from pathlib import Path

from muster.jobs.runfolder.rundir import AttemptDir
from muster.launch.common.follow import LineFollower, as_shown
from muster.launch.common.ranklogs import log_files
from muster.launch.supervision.console import Console


class RankOutputs:
    """The output of one attempt after the other on a console: of rank 0, or with --tee of every rank."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._folder: AttemptDir | None = None
        self._files: dict[tuple[int, str], LineFollower] = {}

    def begin(self, folder: AttemptDir) -> None:
        """Turn to the next attempt, once the last lines of the one before are shown."""
        self.pass_on(last=True)
        self._folder, self._files = folder, {}

    def pass_on(self, *, last: bool = False) -> None:
        """Show the lines that came since the last call; `last`: also one that has no end."""
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
        return sorted(log_files(self._folder.path), key=lambda each: (each[0], each[1] == "err"))
