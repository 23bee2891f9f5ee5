"""A `muster run` in a process of its own, as a user starts it, for the tests that watch or hurt it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import processes
from support.exact_jobs import GPT, tokens
from support.programs import Program, Programs

DEADLINE_S = 90.0
SLEEP = "import time; print('ready'); time.sleep(1000)"
# Its steps wait more than they compute: 0.08 s each, for two processes that read 16 samples.
TRAINING = f"""
nodes: 2
grace_s: 1
train:
  model: {json.dumps({**GPT, "vocabulary": 64})}
  data: {json.dumps(tokens(pause_s=0.01))}
  mode: bucketed
  batch_size: 32
  epochs: 100
  log_every: 1
  loader_workers: 2
  evaluate: false
"""


class LiveRun:
    """One started `muster run`; `text` is the job file. Whatever a test does, `end_all` leaves none behind."""

    started: ClassVar[list["LiveRun"]] = []
    programs: ClassVar[Programs | None] = None  # see the fixture `forked_supervisors`

    def __init__(self, folder: Path, text: str, *arguments: str) -> None:
        self.root = folder / "runs"
        job = folder / "job.yaml"
        job.write_text(text)
        argv, pipe = ["-m", "muster", "run", str(job), "--runs", str(self.root), *arguments], subprocess.PIPE
        if self.programs is not None:
            self.process: Program | subprocess.Popen[str] = self.programs.start(*argv)
        else:
            self.process = subprocess.Popen([sys.executable, *argv], stdout=pipe, stderr=pipe, text=True)
        self.started.append(self)

    @classmethod
    def end_all(cls) -> None:
        """Kill what a failed test left running."""
        while cls.started:
            live = cls.started.pop()
            if live.process.poll() is None:
                live.process.kill()
                live.process.communicate()

    @cached_property
    def run(self) -> RunDir:
        """The run folder; waits for it."""
        wait_until(lambda: self.root.is_dir() and any(self.root.glob("[!.]*")), "the run folder")
        return RunDir(next(self.root.glob("[!.]*")))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.run.events) if row["event"] == name]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until an event has happened, on `count` nodes or times."""
        wait_until(lambda: len(self.events(name)) >= count, f"{count} x {name}")
        return self.events(name)

    def wait_for_output(self, text: str, rank: int) -> None:
        """Wait until a rank has written a text to its standard output."""
        path = self.run.attempt(0).out(rank)
        wait_until(lambda: path.is_file() and text in path.read_text(), f"{text!r} from rank {rank}")

    def pid_of(self, rank: int) -> int:
        """The process of a rank, once all nodes have started theirs."""
        nodes = self.wait_for("submitted")[0]["nodes"]
        pids = {int(each): int(pid) for row in self.wait_for("started", nodes) for each, pid in row["ranks"]}
        return pids[rank]

    def end(self) -> int:
        """Wait for the end; return the exit code. Standard output and error are kept."""
        self.out, self.err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode

    def verdict(self) -> dict[str, Any]:
        """The row of attempts.jsonl."""
        (row,) = read_lines(self.run.attempts)
        return row

    def left(self) -> list[int]:
        """Processes that still carry the run id."""
        return processes.of_run(self.run.run_id)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


def wait_until(
    condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S, *, every_s: float = 0.02
) -> None:
    """Wait for a condition with a deadline. `every_s`: longer where to ask is dear, as a program of its own is."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {deadline_s:g} s for {what}"
        time.sleep(every_s)


def kill(*pids: int) -> None:
    """End processes by SIGKILL, and wait until they are gone."""
    processes.end({pid: ticks for pid in pids if (ticks := processes.start_ticks(pid)) is not None}, term_s=0.0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def argv(code: str) -> str:
    """The `command:` section that runs a piece of Python."""
    return f"command: {json.dumps([sys.executable, '-c', code])}\n"


def two_by_two(code: str, **keys: object) -> str:
    """A job file that runs a piece of Python on two nodes of two ranks; more keys of the job may follow."""
    more = "".join(f"{key}: {value}\n" for key, value in keys.items())
    return f"nodes: 2\nranks_per_node: 2\ngrace_s: 1\n{more}{argv(code)}"
