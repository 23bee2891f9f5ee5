"""The cluster and the supervisor of a run in Slurm's queue, played beside the code under test."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from muster.jobs.basics.files import append_line, read_lines, write_json
from muster.jobs.runfolder.rundir import RunDir
from support.slurm_commands import FakeSlurm

ID = "demo-20250101T000000.000Z-abc123"
SUPERVISOR = {"host": "n1", "pid": 7, "pid_start": 1}


class Player:
    """Plays the cluster and the supervisor beside the code under test."""

    def __init__(self, run: RunDir, slurm: FakeSlurm) -> None:
        self.run = run
        self.slurm = slurm
        self.threads: list[threading.Thread] = []

    def play(self, scene: Callable[[], None]) -> None:
        """Play a scene in the background."""
        self.threads.append(threading.Thread(target=scene))
        self.threads[-1].start()

    def wait(self, condition: Callable[[], Any], deadline_s: float = 20.0) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, "what the test waits for did not come"
            time.sleep(0.02)

    def wait_for_questions(self) -> None:
        """Wait until squeue was asked as things are now, and what it said was heard."""
        before = len(self.slurm.calls("squeue"))
        self.wait(lambda: len(self.slurm.calls("squeue")) > before + 2)

    def event(self, event: str, **fields: Any) -> None:
        append_line(self.run.events, {"time": time.time(), "event": event, **fields})

    def begin(self) -> None:
        """The job gets its nodes, and its supervisor starts the ranks; rank 0 prints."""
        self.slurm.job("12", state="RUNNING", nodes="n[1-2]", host="n1")
        self.event("submitted", nodes=2, world_size=4, transport="slurm", grace_s=0.1, **SUPERVISOR)
        self.lease()
        self.run.attempt(0).make()
        self.event("attempt", attempt=0, world_size=4, master_addr="10.0.0.1", master_port=4000)
        self.run.attempt(0).out(0).write_text("rank 0 says\nhalf a line")
        self.event("joined", attempt=0, seconds=1.5)

    def start_again(self, pid: int) -> None:
        """The job gets its nodes again, and another supervisor begins."""
        self.slurm.job("12", state="RUNNING", nodes="n[1-2]", host="n1")
        self.event("submitted", transport="slurm", **{**SUPERVISOR, "pid": pid})

    def done(self, attempt: int) -> None:
        """An attempt ends well, and with it the job."""
        self.event("ended", attempt=attempt, code=0, message="4 ranks ended with 0", **{"class": "done"})
        self.slurm.job("12", state="COMPLETED")

    def interrupt(self) -> None:
        """Ctrl-C for who follows the run, once it listens; wait until the supervisor is asked to stop."""
        self.begin()
        self.wait(lambda: signal.getsignal(signal.SIGINT) != signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        self.wait(self.run.stop.exists)

    def lease(self) -> None:
        write_json(self.run.lease, {"time": time.time(), "host": "n1", "pid": 7})

    def verdict(self, code: int, name: str, message: str) -> None:
        row = {"attempt": 0, "started": 100.0, "ended": 104.0, "first": None, "victims": [], "next_step": "do this"}
        append_line(self.run.attempts, {**row, "class": name, "code": code, "message": message})
        self.event("ended", attempt=0, code=code, message=message, **{"class": name})


def ended(run: RunDir) -> dict[str, Any]:
    rows = [row for row in read_lines(run.events) if row["event"] == "ended"]
    assert len(rows) == 1
    return rows[0]
