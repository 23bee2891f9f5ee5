"""A box for the tests that need several hosts, made once a session by the command that users have; and its users."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from muster.cloudlab.box.hosts import box_hosts
from muster.jobs.basics.files import read_lines
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.runfolder.rundir import RunDir, list_runs
from muster.launch.records.slurm_job import SlurmJob
from support.live import wait_until

CALL_S = 60.0


class LiveBox:
    """A box that is up. Nodes are entered over ssh, as a user would."""

    def __init__(self, name: str, *options: str, runs: Path | None = None) -> None:
        self.name = name
        self.runs = runs
        self.command("down", "--name", name)  # of a session that was killed
        up = self.command("up", "--name", name, "--nodes", "4", *options)
        assert up.returncode == 0, up.stderr
        self.hosts: HostSet = box_hosts(name)
        self.environment: Mapping[str, str] = self.hosts.environment

    @property
    def spelt(self) -> str:
        """What --hosts is given."""
        return f"box:{self.name}"

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call `muster box`."""
        argv = [sys.executable, "-m", "muster", "box", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=CALL_S, check=False)

    def argv(self, node: str, argv: Sequence[str]) -> list[str]:
        """The command that runs something on a node."""
        return ["ssh", *self.hosts.ssh_options, node, shlex.join(argv)]

    def exec(self, node: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run something on a node."""
        return subprocess.run(self.argv(node, argv), capture_output=True, text=True, timeout=CALL_S, check=False)

    def client(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's from this machine."""
        env = {**os.environ, **self.environment}
        return subprocess.run(argv, capture_output=True, text=True, timeout=CALL_S, check=False, env=env)

    def fail(self, node: str, how: str) -> None:
        """Break a node."""
        done = self.command("fail", node, "--how", how, "--name", self.name)
        assert done.returncode == 0, done.stderr

    def heal(self, node: str) -> None:
        """Mend a node."""
        done = self.command("heal", node, "--name", self.name)
        assert done.returncode == 0, done.stderr

    def status(self) -> dict[str, object]:
        """What `muster box status` says."""
        found: dict[str, object] = json.loads(self.command("status", "--json", "--name", self.name).stdout)
        return found

    def down(self) -> None:
        """Take it down."""
        done = self.command("down", "--name", self.name)
        assert done.returncode == 0, done.stderr


class BoxUser:
    """`muster` as a user of a box types it, with a folder of runs of its own."""

    def __init__(self, box: LiveBox, folder: Path) -> None:
        self.box = box
        self.folder = folder
        self.runs = folder / "runs"
        self.started: list[subprocess.Popen[str]] = []

    def muster(self, *words: str) -> subprocess.Popen[str]:
        """Start a command on the folder of runs; one that is left ends with `close`."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        argv, pipe = [sys.executable, "-m", "muster", *words, "--runs", str(self.runs)], subprocess.PIPE
        self.started.append(subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=env))
        return self.started[-1]

    def start(self, verb: str, job: str, *words: str) -> subprocess.Popen[str]:
        """Start a command on a job file of this text, with the nodes of the box."""
        (self.folder / "job.yaml").write_text(job)
        return self.muster(verb, str(self.folder / "job.yaml"), "--hosts", self.box.spelt, *words)

    def call(self, *words: str) -> tuple[int, str, str]:
        """Call a command: its code, output and error output."""
        return ended(self.muster(*words))

    @property
    def run(self) -> RunDir:
        """The newest run; waits for one."""
        wait_until(lambda: list_runs(self.runs), "a run")
        return list_runs(self.runs)[-1]

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """Wait for an event of the newest run, and return its last row."""
        rows = lambda: [row for row in read_lines(self.run.events) if row["event"] == event]  # noqa: E731
        wait_until(lambda: len(rows()) >= count, f"{count} x {event}")
        return rows()[-1]

    def wait_for_output(self, text: str, rank: int) -> None:
        path = self.run.attempt(0).out(rank)
        wait_until(lambda: path.is_file() and text in path.read_text(), f"{text!r} from rank {rank}")

    def verdict(self) -> dict[str, Any]:
        return list(read_lines(self.run.attempts))[-1]

    @property
    def job(self) -> SlurmJob:
        """The Slurm job of the newest run; waits for it."""
        wait_until(self.run.slurm.is_file, "slurm.json")
        job = SlurmJob.read(self.run)
        assert job is not None
        return job

    def queued(self, *options: str) -> list[str]:
        """The lines of the queue: id, state and nodes, unless other options of squeue are given."""
        return self.box.client("squeue", "--noheader", *(options or ["--format=%i %T %N"])).stdout.splitlines()

    def close(self) -> None:
        """End what is left, here and in the queue."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            if process.stdout is not None and not process.stdout.closed:
                process.communicate(timeout=CALL_S)
        for run in list_runs(self.runs):
            if run.slurm.is_file() and (job := SlurmJob.read(run)):
                job.client().cancel(job.job_id)


def ended(process: subprocess.Popen[str], timeout_s: float = 150.0) -> tuple[int, str, str]:
    """Wait for the end of a process: its code, output and error output."""
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err
