"""`muster run`, `submit` and `stop` through the real Slurm of the box."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir, list_runs
from muster.launch.records.slurm_job import SlurmJob
from muster.launch.scheduler import slurm_follow
from muster.launch.supervision.console import Console
from support.box import LiveBox

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

DEADLINE_S = 90.0
SLEEP = "import os, time; print('rank', os.environ['RANK'], flush=True); time.sleep(120)"


class Login:
    """A login node: `muster` in a folder of its own; what is left in the queue is cancelled."""

    def __init__(self, box: LiveBox, folder: Path) -> None:
        self.box = box
        self.folder = folder
        self.root = folder / "runs"
        self.started: list[subprocess.Popen[str]] = []

    def job(self, nodes: int = 2, code: str = SLEEP) -> str:
        """Write a job file of one rank a node."""
        path = self.folder / "job.yaml"
        path.write_text(f"name: demo\nnodes: {nodes}\ncommand: {json.dumps([sys.executable, '-c', code])}\n")
        return str(path)

    def start(self, verb: str, job: str, *words: str) -> subprocess.Popen[str]:
        """Start `muster VERB JOB --on slurm`."""
        argv = [verb, job, "--on", "slurm", "--hosts", self.box.spelt, "--runs", str(self.root), *words]
        self.started.append(self._muster(argv))
        return self.started[-1]

    def call(self, *words: str) -> tuple[int, str, str]:
        """Call another command of Muster's."""
        process = self._muster([*words, "--runs", str(self.root)])
        out, err = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out, err

    def _muster(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-m", "muster", *argv], stdout=pipe, stderr=pipe, text=True, env=env)

    @property
    def run(self) -> RunDir:
        """The newest run."""
        wait(lambda: list_runs(self.root), "a run folder")
        return list_runs(self.root)[-1]

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event of the newest run."""
        wait(lambda: self._rows(name), name)
        return self._rows(name)[-1]

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.run.events) if row["event"] == name]

    def state(self) -> dict[str, Any]:
        """What `muster status` says."""
        state: dict[str, Any] = json.loads(self.call("status", "--json")[1])
        return state

    def queued(self) -> str:
        """What is in the queue."""
        return self.box.client("squeue", "--noheader", "--format=%i %T %N").stdout

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for run in list_runs(self.root):
            if job := SlurmJob.read(run):
                job.client().cancel(job.job_id)
        wait(lambda: not self.queued(), "an empty queue")


def wait(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.1)


@pytest.fixture
def login(box: LiveBox, tmp_path: Path) -> Iterator[Login]:
    login = Login(box, tmp_path)
    yield login
    login.close()


@pytest.fixture
def full(login: Login) -> Iterator[str]:
    """Fill the cluster, so that whatever is submitted waits."""
    blocker = login.folder / "blocker.sh"
    blocker.write_text("#!/bin/sh\n#SBATCH --nodes=4 --exclusive --output=/dev/null\nexec sleep 120\n")
    job_id = login.box.client("sbatch", "--parsable", str(blocker)).stdout.strip()
    wait(lambda: "RUNNING" in login.queued(), "the blocker")
    yield job_id
    login.box.client("scancel", job_id)


def test_a_run_goes_from_the_queue_to_its_verdict(login: Login) -> None:
    code = "import os; print('hello from', os.environ['RANK'], os.environ['SLURMD_NODENAME'], flush=True)"
    process = login.start("run", login.job(nodes=4, code=code))
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "hello from 0 node0\n"), err
    assert "its supervisor is on node0" in err
    assert "4 ranks ended with 0" in err
    said = [(login.run.attempt(0).out(rank)).read_text() for rank in range(4)]
    assert said == [f"hello from {rank} node{rank}\n" for rank in range(4)]


def test_a_waiting_run_says_why_and_can_be_stopped(login: Login, full: str) -> None:
    process = login.start("submit", login.job(), "--parsable")
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert out.strip() == login.run.run_id
    wait(lambda: "Resources" in str(login.state()["message"]), "the reason")
    assert (login.state()["state"], login.state()["sure"]) == ("starting", True)
    code, out, _ = login.call("stop")
    assert (code, "stopped (130)" in out) == (0, True)
    job = SlurmJob.read(login.run)
    assert job is not None
    assert [line.split()[0] for line in login.queued().splitlines()] == [full]


def test_ctrl_c_takes_a_waiting_job_out_of_the_queue(login: Login, full: str) -> None:
    process = login.start("run", login.job())
    wait(lambda: "PENDING" in login.queued(), "a waiting job")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "stopped by Ctrl-C while Slurm job" in err
    assert "PENDING" not in login.queued()


def test_ctrl_c_stops_a_running_job_and_leaves_nothing(login: Login) -> None:
    process = login.start("run", login.job())
    login.event("started")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    wait(lambda: not login.queued(), "an empty queue")


def test_a_refused_run_names_its_setting(login: Login) -> None:
    process = login.start("run", login.job(), "--set", "slurm.partition=nosuch")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 78
    assert err.startswith("muster: slurm.partition: sbatch says: invalid partition specified: nosuch; name one of the")
    assert "there is batch (4 nodes" in err


def test_a_run_that_can_never_start_is_refused_in_the_end(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    login.start("submit", login.job(nodes=9)).communicate(timeout=DEADLINE_S)
    monkeypatch.setattr(slurm_follow, "HOPELESS_S", 2.0)
    monkeypatch.setattr(slurm_follow, "ASK_S", 0.5)
    assert slurm_follow.follow(login.run, Console(quiet=True)) == 78
    assert "would never start" in login.event("ended")["message"]


def test_a_time_limit_is_said_before_slurm_kills(login: Login) -> None:
    words = ("--set", "slurm.time=2", "--set", "slurm.signal_s=59")
    process = login.start("run", login.job(), *words)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 124
    assert "time limit" in login.event("ended")["message"]


def power_off_the_supervisor(login: Login) -> str:
    """Cut the power of the node where the run's supervisor is; return its name."""
    login.event("started")
    job = SlurmJob.read(login.run)
    assert job is not None
    where = login.box.client("squeue", "--noheader", "--format=%B", f"--jobs={job.job_id}").stdout.strip()
    login.box.fail(where, "power")
    return where


def test_the_end_of_the_supervisors_node_ends_the_run(login: Login) -> None:
    """Slurm would leave the job running on the node that is left (see slurm.states.is_orphan)."""
    process = login.start("run", login.job(), "--set", "slurm.requeue=false")
    where = power_off_the_supervisor(login)
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode != 0, err
        wait(lambda: not login.queued(), "an empty queue")
    finally:
        login.box.heal(where)


@pytest.mark.soak
def test_a_run_that_may_be_queued_again_begins_anew_without_the_node_of_its_supervisor(login: Login) -> None:
    process = login.start("run", login.job(code="import os, time; print('rank', os.environ['RANK']); time.sleep(5)"))
    where = power_off_the_supervisor(login)
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        assert login.run.attempt_numbers() == [0, 1]
        placement = json.loads(login.run.attempt(1).placement.read_text())
        assert where not in [node["host"] for node in placement["nodes"]]
    finally:
        login.box.heal(where)


def test_a_run_that_is_queued_again_is_shown_as_waiting(login: Login) -> None:
    """Its last row says "stopped": who believed that would start a second one."""
    process = login.start("submit", login.job())
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    login.event("started")
    job = SlurmJob.read(login.run)
    assert job is not None
    assert out.startswith(f"{login.run.run_id} is Slurm job {job.job_id}; muster logs -f ")
    requeued = login.box.client("scontrol", "requeue", job.job_id)
    assert requeued.returncode == 0, requeued.stderr
    assert login.event("ended")["code"] == 130
    wait(lambda: login.state()["state"] == "starting", "a waiting run")
    assert "queued again" in login.state()["message"]
