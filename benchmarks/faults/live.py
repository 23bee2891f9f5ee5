"""A run that is about to be hurt: a `muster` of its own process, what it writes, and its processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes

DEADLINE_S = 90.0
POLL_S = 0.003
BENT = Path(__file__).with_name("bent.py")
T = TypeVar("T")


class WaitedInVainError(Exception):
    """Something did not come in time: the row fails, and says what."""


def wait_for(what: str, condition: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
    """Return what a condition gives as soon as it is true.

    Raises:
        WaitedInVainError: the deadline has passed.
    """
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise WaitedInVainError(f"waited {deadline_s:g} s for {what}")
        time.sleep(POLL_S)
    return found


@dataclass
class Live:
    """A started `muster run` or `muster resume`, and its run folder."""

    process: "subprocess.Popen[bytes]"
    root: Path
    said: Path  # its standard error
    first_attempt: int = 0  # of this supervisor

    @property
    def run(self) -> RunDir:
        """The run folder; waits for it."""

        def found() -> Path | None:
            entries = list(self.root.iterdir()) if self.root.is_dir() else []
            return next((each for each in entries if (each / "events.jsonl").is_file()), None)

        if self.process.poll() is None or found() is None:
            return RunDir(wait_for(f"a run folder in {self.root}", found))
        return RunDir(found() or self.root)

    # What it has written --------------------------------------------------------------------------------------------

    def events(self, name: str | None = None, *, attempt: int | None = None) -> list[dict[str, Any]]:
        """Return its events, of one name and attempt if they are given."""
        rows = read_lines(self.run.events)
        return [
            row
            for row in rows
            if (name is None or row["event"] == name) and (attempt is None or row.get("attempt") == attempt)
        ]

    def wait_event(self, name: str, *, attempt: int | None = None, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Return the first event of a name (and attempt) as soon as there is one."""

        def found() -> dict[str, Any] | None:
            rows = self.events(name, attempt=attempt)
            if not rows and self.process.poll() is not None:
                raise WaitedInVainError(f"{name} of attempt {attempt}: the run has ended; {self.last_words()}")
            return rows[0] if rows else None

        return wait_for(f"the event {name} of attempt {attempt}", found, deadline_s)

    def steps(self, attempt: int | None = None) -> int:
        """Return the newest step that the run's metrics have, of an attempt or of any."""
        rows = read_lines(self.run.metrics) if self.run.metrics.exists() else []
        return max((row["step"] for row in rows if attempt in (None, row["attempt"])), default=0)

    def wait_step(self, step: int, attempt: int | None = None) -> int:
        """Return when a step is in the metrics."""

        def reached() -> int | None:
            if self.process.poll() is not None:
                raise WaitedInVainError(f"step {step}: the run has ended; {self.last_words()}")
            done = self.steps(attempt)
            return done if done >= step else None

        return wait_for(f"step {step}", reached)

    def committed(self) -> list[Path]:
        """List the checkpoints that have a manifest, by step and attempt."""
        return sorted(each.parent for each in self.run.checkpoints.glob("step-*/MANIFEST.json"))

    def wait_committed(self, count: int) -> list[Path]:
        """Return the checkpoints when there are as many."""

        def enough() -> list[Path] | None:
            if self.process.poll() is not None:
                raise WaitedInVainError(f"{count} checkpoints: the run has ended; {self.last_words()}")
            found = self.committed()
            return found if len(found) >= count else None

        return wait_for(f"{count} checkpoints", enough)

    def attempts(self) -> list[dict[str, Any]]:
        """Return the rows of attempts.jsonl."""
        return list(read_lines(self.run.attempts)) if self.run.attempts.exists() else []

    def last_words(self) -> str:
        """Return the end of what it said."""
        lines = self.said.read_text(errors="replace").strip().splitlines() if self.said.exists() else []
        return " | ".join(lines[-3:])[-400:]

    # Its processes --------------------------------------------------------------------------------------------------

    def ranks(self, attempt: int | None = None) -> dict[int, int]:
        """Return pid by rank, once all nodes of an attempt (the newest) have started theirs."""
        self.wait_event("attempt", attempt=attempt)
        newest = self.events("attempt")[-1]["attempt"] if attempt is None else attempt

        def all_started() -> dict[int, int] | None:
            size = self.events("attempt", attempt=newest)[-1]["world_size"]
            rows = self.events("started", attempt=newest)
            pids = {int(rank): int(pid) for row in rows for rank, pid in row["ranks"]}
            return pids if len(pids) == size else None

        return wait_for(f"the ranks of attempt {newest}", all_started)

    def agents(self) -> list[int]:
        """List the pids of a local run's agents, in node order; an agent carries no run id, for it serves attempts."""
        found = [pid for pid in children(self.process.pid) if b"muster.launch.agent" in arguments_of(pid)]
        return sorted(found, key=lambda pid: int(arguments_of(pid).rpartition(b"--node\0")[2].partition(b"\0")[0]))

    def keepers(self) -> list[int]:
        """List the keepers: children of a warm process."""
        found = self.tree()
        warm = [pid for pid in found if b"muster.jobs.node.warm" in arguments_of(pid)]
        # A fork has its parent's arguments: the warm process is the one whose parent is no warm process.
        roots = [pid for pid in warm if b"muster.jobs.node.warm" not in arguments_of(parent(pid))]
        return [pid for pid in warm if parent(pid) in roots]

    def store(self) -> int:
        """Return the store: a keeper's child that is no rank."""
        ranks = set(self.ranks().values())
        keepers = set(self.keepers())
        found = [pid for pid in self.tree() if parent(pid) in keepers and pid not in ranks]
        if not found:
            raise WaitedInVainError("no store process found below the keepers")
        return found[0]

    def writers(self, rank_pid: int) -> list[int]:
        """List the processes below a rank: the helper that writes its checkpoints, its data loaders."""
        return [pid for pid in self.tree() if parent(pid) == rank_pid]

    def tree(self) -> list[int]:
        """List every process of the run but its supervisor."""
        return [pid for pid in processes.of_run(self.run.run_id) if pid != self.process.pid]

    # Its end --------------------------------------------------------------------------------------------------------

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the end and return the exit code; past the deadline it is killed, and the row fails."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise WaitedInVainError(f"waited {deadline_s:g} s for the run's end; {self.last_words()}") from None

    def kill(self) -> None:
        """Kill the supervisor, and wait until nothing of the run is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        try:
            run_id = self.run.run_id
        except WaitedInVainError:
            return  # it never made a folder: nothing was started
        try:
            wait_for("the run's processes to go", lambda: not processes.of_run(run_id), 20.0)
        except WaitedInVainError:
            processes.kill_run(run_id, term_s=0.0)  # frozen ones cannot go by themselves
            raise


def start(
    folder: Path,
    text: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    bend: str = "",
    runs: Path | None = None,
) -> Live:
    """Start `muster run` of a job's text; `bend` is a fault inside of the ranks (bent.py)."""
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.yaml"
    job.write_text(text)
    root = runs or folder / "runs"
    said = folder / "said.txt"
    return Live(_muster("run", [str(job), "--runs", str(root), *arguments], said, env, bend), root, said)


def resume(live: Live, *arguments: str, env: Mapping[str, str] | None = None, bend: str = "") -> Live:
    """Start `muster resume` of a run whose supervisor has ended."""
    first = 1 + max(live.run.attempt_numbers(), default=-1)
    given = [live.run.run_id, "--runs", str(live.root), *arguments]
    return Live(_muster("resume", given, live.said, env, bend), live.root, live.said, first)


def muster(*arguments: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    """Call a `muster` command and wait for it."""
    argv = [sys.executable, "-m", "muster", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)


def _muster(
    verb: str, arguments: Sequence[str], said: Path, env: Mapping[str, str] | None, bend: str
) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, str(BENT), bend] if bend else [sys.executable, "-m", "muster"]
    with said.open("ab") as errors:
        return subprocess.Popen(
            [*argv, verb, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # a Ctrl-C at the benchmark is the benchmark's
        )


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal processes; one that has just gone is no matter."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def parent(pid: int) -> int:
    """Return a process's parent; 0 when it has gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def children(pid: int) -> list[int]:
    """List a process's children."""
    every = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [each for each in every if parent(each) == pid]


def arguments_of(pid: int) -> bytes:
    """Return what a process was started with, as bytes with zeros between; empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def read_rank_lines(live: Live, mark: str) -> list[float]:
    """Return the times at the end of the lines with which ranks say, on standard error, that they are bent."""
    found = []
    for path in live.run.path.glob("attempt-*/rank-*.err"):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith(mark)]
        found += [float(line.rpartition(", ")[2]) for line in lines]
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text())
