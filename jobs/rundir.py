"""The run folder: every path in it is spelt here, and only here. One writer per file.

    runs/<name>-<utc>-<id>/
      job.yaml  site.yaml  attempts.jsonl  events.jsonl          supervisor only
      metrics.jsonl                                              rank 0 only
      stop.json                                                  `muster stop` only
      attempt-000/   mkdir is the token of the attempt
        placement.json  commands/                                supervisor
        node-00.json  node-00.setup                              agent of that node
        rank-00000.out  rank-00000.err  metrics-00000.jsonl      that rank

Files are written under a temporary name and renamed; logs (`*.jsonl`, `*.out`, `*.err`) append. A JSON line is
one `write`, so a reader sees whole lines or an unfinished last one.
"""

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from jobs.errors import MusterError, RunFolderError, StorageError

DEFAULT_RUNS: Final = "runs"
RUNS_VARIABLE: Final = "MUSTER_RUNS"


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        """The folder's name, unique among runs."""
        return self.path.name

    @property
    def job(self) -> Path:
        """The job file as given, with overrides applied."""
        return self.path / "job.yaml"

    @property
    def site(self) -> Path:
        """The site file as used."""
        return self.path / "site.yaml"

    @property
    def attempts(self) -> Path:
        """One line per attempt: its verdict."""
        return self.path / "attempts.jsonl"

    @property
    def events(self) -> Path:
        """One line per event of the supervisor."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line per step: loss over the global batch and rank 0's times."""
        return self.path / "metrics.jsonl"

    @property
    def stop(self) -> Path:
        """A request to stop, written by `muster stop`, read by the supervisor."""
        return self.path / "stop.json"

    @property
    def verify(self) -> Path:
        """The comparison that `muster verify` made."""
        return self.path / "verify.json"

    def attempt(self, attempt: int) -> "AttemptDir":
        """Return the paths of one attempt, made or not."""
        return AttemptDir(self.path / f"attempt-{attempt:03d}")

    def attempt_numbers(self) -> list[int]:
        """List the attempts that exist, oldest first."""
        names = (entry.name for entry in self.path.glob("attempt-[0-9]*"))
        return sorted(int(name.removeprefix("attempt-")) for name in names if name.removeprefix("attempt-").isdecimal())


@dataclass(frozen=True)
class AttemptDir:
    """The paths of one attempt."""

    path: Path

    def make(self) -> None:
        """Make the folder, the token of the attempt, and the commands' in it, which only the user may read.

        Raises:
            RunFolderError, StorageError: it cannot be made.
        """
        try:
            self.path.mkdir()
            self.commands.mkdir(mode=0o700)  # the environments in there may hold secrets
        except OSError as error:
            raise folder_error(self.path, error) from error

    @property
    def placement(self) -> Path:
        """Which rank runs where, and each value's origin."""
        return self.path / "placement.json"

    @property
    def commands(self) -> Path:
        """Folder of the exact argv per node."""
        return self.path / "commands"

    def command(self, node_rank: int) -> Path:
        """The exact command of one node's agent and its ranks."""
        return self.commands / f"node-{node_rank:02d}.json"

    def node(self, node_rank: int) -> Path:
        """What one node's agent started: pids, cores, host."""
        return self.path / f"node-{node_rank:02d}.json"

    def setup(self, node_rank: int) -> Path:
        """Output of the job's setup lines on one node."""
        return self.path / f"node-{node_rank:02d}.setup"

    def out(self, rank: int) -> Path:
        """Standard output of a rank."""
        return self.path / f"rank-{rank:05d}.out"

    def err(self, rank: int) -> Path:
        """Standard error of a rank."""
        return self.path / f"rank-{rank:05d}.err"

    def metrics(self, rank: int) -> Path:
        """A rank's own steps: local loss and times."""
        return self.path / f"metrics-{rank:05d}.jsonl"


def runs_root(given: str | None) -> Path:
    """Return the folder of all runs: the given one, else MUSTER_RUNS, else ./runs."""
    return Path(given or os.environ.get(RUNS_VARIABLE) or DEFAULT_RUNS).absolute()


def run_path(root: Path, name: str) -> Path:
    """Choose the path of a new run under `root`: name, time and a random part; nothing is made."""
    now = datetime.now(timezone.utc)
    return root / f"{name}-{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}Z-{secrets.token_hex(3)}"


def make_run(run: RunDir) -> None:
    """Make the folder of a new run.

    Raises:
        RunFolderError: the folder cannot be made or written.
        StorageError: the disk is full.
    """
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        run.path.mkdir()
    except OSError as error:
        raise folder_error(run.path, error) from error


def new_run(root: Path, name: str) -> RunDir:
    """Choose and make the folder of a new run; errors as `make_run`."""
    run = RunDir(run_path(root, name))
    make_run(run)
    return run


def find_run(root: Path, given: str | None) -> RunDir:
    """Find a run by path, id, or unique part of an id; the newest when nothing is given.

    Raises:
        RunFolderError: no run or more than one fits.
    """
    if given and (Path(given) / "events.jsonl").is_file():
        return RunDir(Path(given).absolute())
    runs = list_runs(root)
    if not runs:
        raise RunFolderError(f"{root}: no runs here; start one with muster run, or name their folder with --runs DIR")
    if given is None:
        return runs[-1]
    found = [run for run in runs if given == run.run_id] or [run for run in runs if given in run.run_id]
    if len(found) == 1:
        return found[0]
    if not found:
        raise RunFolderError(f"{root}: no run named {given!r}; newest: {', '.join(run.run_id for run in runs[-3:])}")
    names = ", ".join(run.run_id for run in found[-4:])
    raise RunFolderError(f"{root}: {given!r} fits {len(found)} runs: {names}; give more of the name")


def list_runs(root: Path) -> list[RunDir]:
    """List runs under a folder, oldest first by the time in their names."""
    if not root.is_dir():
        return []
    runs = [RunDir(entry) for entry in root.iterdir() if (entry / "events.jsonl").is_file()]
    return sorted(runs, key=lambda run: (run.run_id.rsplit("-", 2)[-2:], run.run_id))


def write_text(path: Path, text: str) -> None:
    """Write a whole file under a temporary name, then rename it into place.

    Raises:
        RunFolderError, StorageError: as `folder_error` says.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise folder_error(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, by rename."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record as one line; errors as `append_lines`."""
    append_lines(path, [record])


def append_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append records as JSON lines with one write, so that a reader never sees half of one among whole ones.

    Raises:
        RunFolderError, StorageError: as `folder_error` says; the lines before stay whole.
    """
    if not records:
        return
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            written = os.write(descriptor, data)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise folder_error(path, error) from error
    if written != len(data):
        raise StorageError(f"{path}: the disk is full ({written} of {len(data)} bytes written); free some space")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; an unfinished last line and a missing file yield nothing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:  # a line torn by a full disk: the lines around it still count
            continue
        if isinstance(record, dict):
            yield record


def folder_error(path: Path, error: OSError) -> MusterError:
    """Turn a failed write into the error that says what to do."""
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return StorageError(f"{path}: {error.strerror}; free some space, or choose another folder with --runs DIR")
    return RunFolderError(f"{path}: cannot write here: {error.strerror}; choose another folder with --runs DIR")
