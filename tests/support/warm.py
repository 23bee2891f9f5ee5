"""A warm process and its rank parents, commanded over their sockets as agents do; and ranks that are hard to end."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from muster.jobs.hosts import ranks
from muster.launch.common.processes import kill_run, of_run
from support.live import wait_until

DEADLINE_S = 20.0
SLEEP = ["sleep", "1000"]
STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
"""
DEAF = STUBBORN + "print('ready')\ntime.sleep(1000)"
# Two that escape: one in a session of its own, one that forked twice for that; both deaf, and not of the rank's group.
# The second is ready once who forked it has gone: until then there would be three.
ESCAPES = (
    STUBBORN
    + """
waiting, ready = os.pipe()
for forks in (1, 2):
    if os.fork() == 0:
        os.setsid()
        between = os.getpid()
        if forks == 2 and os.fork():
            os._exit(0)
        while forks == 2 and os.getppid() == between:
            time.sleep(0.001)
        os.write(ready, b".")
        time.sleep(1000)
count = 0
while count < 2:
    count += len(os.read(waiting, 2))
print("ready", flush=True)
"""
)


class Warm:
    """A warm process with its rank parents; the test is their agents. `code` runs in its place, with the sockets."""

    def __init__(self, folder: Path, rank_parents: int, preload: str, code: str = "") -> None:
        self.folder = folder
        self.run_id = f"rank parent-{os.getpid()}-{time.monotonic_ns()}"
        pairs = [socket.socketpair() for _ in range(rank_parents)]
        descriptors = [theirs.fileno() for _, theirs in pairs]
        fds = ",".join(map(str, descriptors))
        what = ["-c", code, fds] if code else ["-m", "muster.jobs.node.warm", "--fds", fds, "--preload", preload]
        argv = [sys.executable, "-I", *what]
        self.said = (folder / "warm.err").open("w+")
        self.process = subprocess.Popen(
            argv, pass_fds=descriptors, env={**os.environ, ranks.RUN_ID: self.run_id}, stderr=self.said
        )
        self.agents = []
        for ours, theirs in pairs:
            theirs.close()
            ours.settimeout(DEADLINE_S)
            self.agents.append(ours)
        self.readers = [ours.makefile("rb") for ours in self.agents]
        self.rank_parents: list[int] = []

    def next(self, key: str, rank_parent: int = 0) -> dict[str, Any]:
        """Return the next message, which must be of this kind."""
        message: dict[str, Any] = json.loads(self.readers[rank_parent].readline())
        assert key in message, message
        return message

    def wait_for_rank_parents(self) -> "Warm":
        self.rank_parents = [self.next("ready", rank_parent)["ready"] for rank_parent in range(len(self.agents))]
        return self

    def tell(self, message: dict[str, Any], rank_parent: int = 0) -> None:
        self.agents[rank_parent].sendall((json.dumps(message) + "\n").encode())

    def out(self, rank: int) -> Path:
        return self.folder / f"{rank}.out"

    def err(self, rank: int) -> Path:
        return self.folder / f"{rank}.err"

    def rank(self, rank: int, argv: list[str] | None = None, *, code: str = "", **fields: Any) -> dict[str, Any]:
        """Describe a rank that runs a program, or Python code in the fork itself."""
        what = {"argv": argv} if argv is not None else {"call": "builtins:exec", "payload": code}
        start = {"rank": rank, "env": {}, "workdir": str(self.folder), "cores": [], "threads": 1, **what}
        return {**start, "out": str(self.out(rank)), "err": str(self.err(rank)), **fields}

    def start(self, *starts: dict[str, Any], rank_parent: int = 0, attempt: int = 0) -> dict[int, int]:
        """Start ranks; return their pids."""
        self.tell({"do": "start", "attempt": attempt, "ranks": list(starts)}, rank_parent)
        return dict(self.next("started", rank_parent)["started"])

    def stop(self, *numbers: int, grace_s: float = 0.0) -> dict[str, Any]:
        """Stop the ranks, which must be these; return what was swept."""
        self.tell({"do": "stop", "grace_s": grace_s})
        self.end_of(*numbers)
        return self.next("swept")

    def looked(self) -> dict[int, dict[str, Any]]:
        """Ask how far every rank is."""
        self.tell({"do": "look"})
        names = ("phase", "steps", "beats", "slowest_s", "held", "session")
        return {rank: dict(zip(names, seen, strict=True)) for rank, *seen in self.next("looked")["looked"]}

    def end_of(self, *numbers: int, rank_parent: int = 0) -> list[dict[str, Any]]:
        """Wait until these ranks have ended; return their records in rank order."""
        records = [self.next("exited", rank_parent) for _ in numbers]
        assert sorted(record["exited"] for record in records) == sorted(numbers)
        return sorted(records, key=lambda record: record["exited"])

    def wait_for_output(self, rank: int, text: str = "ready\n") -> None:
        path = self.out(rank)
        wait_until(lambda: path.is_file() and path.read_text() == text, f"{text!r} from rank {rank}")

    def left(self) -> list[int]:
        return of_run(self.run_id)

    def close(self) -> None:
        for each in (*self.readers, *self.agents):
            each.close()

    def kill(self) -> None:
        """Leave nothing behind, whatever the test has shown."""
        self.close()
        self.process.kill()
        self.process.wait()
        kill_run(self.run_id, term_s=0.0)
        self.said.close()


def state_of(pid: int) -> str:
    """The letter of proc(5): S waits, T stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
