"""Programs in forks of `rank_server.py`, which has imported torch: a start costs 0.05 s of CPU time, not 2 s."""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.jobs.machine import procfs

Ask = Callable[[dict[str, Any]], dict[str, Any]]


class Program:
    """A started program, used as subprocess.Popen is. Its standard output and error are the files `out` and `err`."""

    def __init__(self, ask: Ask, argv: list[str], pid: int, out: Path, err: Path) -> None:
        self._ask, self.argv, self.pid, self.out, self.err = ask, argv, pid, out, err
        self.returncode: int | None = None

    def wait(self, deadline_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end; at the deadline it is killed."""
        if self.returncode is None:
            self.returncode = self._ask({"wait": self.pid, "deadline_s": deadline_s})["code"]
        return subprocess.CompletedProcess(self.argv, self.returncode, self.out.read_text(), self.err.read_text())

    def communicate(self, timeout: float = 90.0) -> tuple[str, str]:
        done = self.wait(timeout)
        return done.stdout, done.stderr

    def poll(self) -> int | None:
        """Return its exit code once it has ended."""
        fields = procfs.stat(self.pid) if self.returncode is None else None  # it has a pid until it is waited for
        return None if fields is not None and not procfs.is_dead(fields) else self.wait().returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Programs:
    """Starts programs as `python FILE ARGUMENT ...` or `python -m MODULE ARGUMENT ...` would.

    Each leads a session of processes. A test of what a program imports, or of what is left in memory at its end, needs
    an interpreter of its own.
    """

    def __init__(self, ask: Ask, folder: Path) -> None:
        self._ask, self._folder = ask, folder
        self._started = 0

    def start(
        self,
        *argv: str | Path,
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        stdin: Path | None = None,
        descriptors: Sequence[int] = (),
    ) -> Program:
        """Start a program. `stdin`: a file that it reads; it may be a FIFO. It has `descriptors` as 4, 5, ..."""
        words = [str(word) for word in argv]
        out, err = (self._folder / f"program-{self._started}.{stream}" for stream in ("out", "err"))
        self._started += 1
        order = {
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "files": [str(stdin or os.devnull), str(out), str(err)],
            "descriptors": str(out.with_suffix(".socket")) if descriptors else None,
        }
        with socket.socket(socket.AF_UNIX) as giver:
            if descriptors:
                giver.bind(order["descriptors"])
                giver.listen()
            program = Program(self._ask, words, self._ask({"start": words, **order})["pid"], out, err)
            if descriptors:
                with giver.accept()[0] as taker:
                    socket.send_fds(taker, [b"."], descriptors)
        return program

    def run(self, *argv: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        return self.start(*argv, **options).wait()
