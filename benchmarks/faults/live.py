"""A run that is about to be hurt: a `muster` of its own process, what it writes, and its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from muster.jobs.basics import boot
from muster.jobs.basics.files import read_lines
from muster.jobs.machine import linux
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes

DEADLINE_S = 90.0
POLL_S = 0.003
LEAST_STEPS = 10  # that training does while something else stands still
BENT = Path(__file__).with_name("bent.py")
AGENT, WARM = b"muster.launch.agent", b"muster.jobs.node.warm"
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
    """A started `muster run` or `muster resume`, its run folder, and what a row of the matrix finds out about it."""

    process: "subprocess.Popen[bytes]"
    root: Path
    said: Path  # its standard error
    first_attempt: int = 0  # of this supervisor
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def run(self) -> RunDir:
        """The run folder; waits for it."""
        found = wait_for(f"a run folder in {self.root}", lambda: next(self.root.glob("*/events.jsonl"), None))
        return RunDir(found.parent)

    # What it has written --------------------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
        """Return what a condition gives as soon as it is true.

        Raises:
            WaitedInVainError: the deadline has passed, or the run has ended.
        """

        def found() -> T | None:
            has_ended = self.process.poll() is not None
            value = condition()
            if has_ended and not value:
                raise WaitedInVainError(f"{what}: the run has ended; {self.last_words()}")
            return value

        return wait_for(what, found, deadline_s)

    def events(self, name: str | None = None, *, attempt: int | None = None) -> list[dict[str, Any]]:
        """Return its events, of one name and attempt if they are given."""
        return [
            row
            for row in read_lines(self.run.events)
            if name in (None, row["event"]) and attempt in (None, row.get("attempt"))
        ]

    def wait_event(self, name: str, *, attempt: int | None = None, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Return the first event of a name (and attempt) as soon as there is one."""
        what = f"the event {name} of attempt {attempt}"
        return self.wait(what, lambda: self.events(name, attempt=attempt), deadline_s)[0]

    def wait_later(self, name: str, attempt: int) -> dict[str, Any]:
        """Return the first event of a name in an attempt or a later one, as soon as there is one."""
        what = f"the event {name} of attempt {attempt} or a later one"
        return self.wait(what, lambda: [row for row in self.events(name) if row["attempt"] >= attempt])[0]

    def steps(self, attempt: int | None = None) -> int:
        """Return the newest step that the run's metrics have, of an attempt or of any."""
        rows = read_lines(self.run.metrics)
        return max((row["step"] for row in rows if attempt in (None, row["attempt"])), default=0)

    def wait_step(self, step: int, attempt: int | None = None) -> None:
        """Return when a step is in the metrics."""
        self.wait(f"step {step}", lambda: self.steps(attempt) >= step)

    def committed(self) -> list[Path]:
        """List the checkpoints that have a manifest, by step and attempt."""
        return sorted(each.parent for each in self.run.checkpoints.glob("step-*/MANIFEST.json"))

    def wait_committed(self, count: int) -> None:
        """Return when there are as many checkpoints."""
        self.wait(f"{count} checkpoints", lambda: len(self.committed()) >= count)

    def attempts(self) -> list[dict[str, Any]]:
        """Return the rows of attempts.jsonl."""
        return list(read_lines(self.run.attempts))

    def last_words(self) -> str:
        """Return the end of what it said."""
        lines = self.said.read_text(errors="replace").strip().splitlines() if self.said.exists() else []
        return " | ".join(lines[-3:])[-400:]

    def attempt(self) -> dict[str, Any]:
        """Return the newest attempt's event; waits for the first one."""
        return self.wait("an attempt", lambda: self.events("attempt")[-1:])[0]

    # Its processes --------------------------------------------------------------------------------------------------

    def ranks(self, attempt: int | None = None) -> dict[int, int]:
        """Return pid by rank, once all nodes of an attempt (the newest) have started theirs.

        With in_place, an attempt may end before that. Then the next one is the newest. Ranks that wait to join an
        attempt have larger numbers, and are not listed.
        """

        def all_started() -> dict[int, int] | None:
            for begun in self.events("attempt", attempt=attempt)[-1:]:
                rows = self.events("started", attempt=begun["attempt"])
                pids = {int(rank): int(pid) for row in rows for rank, pid in row["ranks"] if rank < begun["world_size"]}
                if len(pids) == begun["world_size"]:
                    return pids
            return None

        which = "the newest attempt" if attempt is None else f"attempt {attempt}"
        return self.wait(f"the ranks of {which}", all_started)

    def agents(self) -> list[int]:
        """List the pids of a local run's agents, in node order; an agent carries no run id, for it serves attempts."""
        found = [pid for pid in children(self.process.pid) if AGENT in arguments_of(pid)]
        return sorted(found, key=lambda pid: int(arguments_of(pid).rpartition(b"--node\0")[2].partition(b"\0")[0]))

    def rank_parents(self) -> list[int]:
        """List the rank parents: children of a warm process."""
        warm = {pid for pid in processes.of_run(self.run.run_id) if WARM in arguments_of(pid)}
        # A fork has its parent's arguments: the warm process is the one whose parent is no warm process.
        roots = warm - {child for pid in warm for child in children(pid)}
        return sorted(child for root in roots for child in children(root) if child in warm)

    def store(self) -> int:
        """Return the store: a rank parent's child that is no rank."""
        ranks = self.ranks().values()
        found = [pid for rank_parent in self.rank_parents() for pid in children(rank_parent) if pid not in ranks]
        if not found:
            raise WaitedInVainError("no store process found below the rank parents")
        return found[0]

    def helpers(self) -> list[int]:
        """List the processes below the ranks, which write their checkpoints."""
        return [helper for pid in self.ranks().values() for helper in children(pid)]

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
        for path in self.root.glob("*/events.jsonl"):  # without one, nothing was started
            run_id = RunDir(path.parent).run_id
            try:
                wait_for("the run's processes to go", partial(_has_gone, run_id), 20.0)
            except WaitedInVainError:
                processes.kill_run(run_id, term_s=0.0)  # frozen ones cannot go by themselves
                raise


def start(folder: Path, text: str, *arguments: str, runs: Path | None = None, **options: Any) -> Live:
    """Start `muster run` of a job's text; `options` are those of `_muster`."""
    folder.mkdir(parents=True, exist_ok=True)
    job, said = folder / "job.yaml", folder / "said.txt"
    job.write_text(text)
    root = runs or folder / "runs"
    return Live(_muster("run", [str(job), "--runs", str(root), *arguments], said, **options), root, said)


def resume(live: Live, *arguments: str, **options: Any) -> Live:
    """Start `muster resume` of a run whose supervisor has ended."""
    first = 1 + max(live.run.attempt_numbers(), default=-1)
    process = _muster("resume", [live.run.run_id, "--runs", str(live.root), *arguments], live.said, **options)
    return Live(process, live.root, live.said, first, live.notes, live.wrong)


def _muster(
    verb: str, arguments: Sequence[str], said: Path, *, env: Mapping[str, str] | None = None, bend: str = ""
) -> "subprocess.Popen[bytes]":
    """Start a `muster` command; `bend` is a fault inside of the ranks (bent.py)."""
    argv = [sys.executable, "-m", "muster"]
    if bend:
        argv = [*boot.module_argv(sys.executable, "muster.bent", str(_bent_root(said.parent))), bend]
    with said.open("ab") as errors:
        return subprocess.Popen(
            [*argv, verb, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **(env or {})},
            start_new_session=True,  # a Ctrl-C at the benchmark is the benchmark's
            preexec_fn=partial(linux.die_with_parent, os.getpid()),  # its agents then end, too, by their lease
        )


def _bent_root(folder: Path) -> Path:
    """Return a root of code that has bent.py in its package: processes of ours import nothing from anywhere else."""
    root = folder / "code"
    if not root.exists():
        (root / "muster").mkdir(parents=True)
        for each in Path(boot.CODE_ROOT, "muster").iterdir():
            (root / "muster" / each.name).symlink_to(each.resolve())
        (root / "muster" / BENT.name).symlink_to(BENT)
    return root


def box(*words: str) -> None:
    """Call `muster box`.

    Raises:
        WaitedInVainError: it refused.
    """
    argv = [sys.executable, "-m", "muster", "box", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise WaitedInVainError(f"muster box {' '.join(words)}: {done.stderr.strip()[-300:]}")


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    """Signal processes; one that has just gone is no matter."""
    for pid in pids:
        linux.kill_quietly(pid, number)


def _has_gone(run_id: str) -> bool:
    return not processes.of_run(run_id)


def trains_on(live: Live, seconds: float, while_stands: str) -> None:
    """Note how many steps are trained in some seconds; few are wrong."""
    first = live.steps()
    time.sleep(seconds)
    noted = f"{live.steps() - first} steps while {while_stands} stood"
    live.notes.append(noted)
    if live.steps() - first <= LEAST_STEPS:
        live.wrong.append(f"only {noted}: training waited")


def children(pid: int) -> list[int]:
    """List a process's children."""
    return linux.all_children().get(pid, [])


def arguments_of(pid: int) -> bytes:
    """Return what a process was started with, as bytes with zeros between; empty when it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
