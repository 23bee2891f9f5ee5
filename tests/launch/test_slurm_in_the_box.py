"""`muster run`, `submit` and `stop` through the real Slurm of the box."""

import json
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from muster.launch.scheduler import slurm_follow
from muster.launch.supervision.console import Console
from support.box import BoxUser, ended
from support.live import argv, wait_until

pytestmark = [pytest.mark.command, pytest.mark.cluster, pytest.mark.timeout(180)]

DEADLINE_S = 90.0
SLEEP = "import os, time; print('rank', os.environ['RANK'], flush=True); time.sleep(120)"


def job(nodes: int = 2, code: str = SLEEP) -> str:
    """A job file of one rank a node."""
    return f"name: demo\nnodes: {nodes}\n{argv(code)}"


def start(user: BoxUser, verb: str, text: str, *words: str) -> subprocess.Popen[str]:
    return user.start(verb, text, "--on", "slurm", *words)


def state_of(user: BoxUser) -> dict[str, Any]:
    """What `muster status` says."""
    state: dict[str, Any] = json.loads(user.call("status", "--json")[1])
    return state


def is_queued(user: BoxUser, state: str) -> bool:
    return any(state in line for line in user.queued())


@pytest.fixture
def login(user: BoxUser) -> Iterator[BoxUser]:
    """A login node; what is left in the queue is cancelled, and waited for."""
    yield user
    user.close()
    wait_until(lambda: not user.queued(), "an empty queue", every_s=0.2)


@pytest.fixture
def full(login: BoxUser) -> Iterator[str]:
    """Fill the cluster, so that whatever is submitted waits."""
    blocker = login.folder / "blocker.sh"
    blocker.write_text("#!/bin/sh\n#SBATCH --nodes=4 --exclusive --output=/dev/null\nexec sleep 120\n")
    job_id = login.box.client("sbatch", "--parsable", str(blocker)).stdout.strip()
    wait_until(lambda: is_queued(login, "RUNNING"), "the blocker", every_s=0.2)
    yield job_id
    login.box.client("scancel", job_id)


def test_a_run_goes_from_the_queue_to_its_verdict(login: BoxUser) -> None:
    code = "import os; print('hello from', os.environ['RANK'], os.environ['SLURMD_NODENAME'], flush=True)"
    ended_with, out, err = ended(start(login, "run", job(nodes=4, code=code)))
    assert (ended_with, out) == (0, "hello from 0 node0\n"), err
    assert "its supervisor is on node0" in err
    assert "4 ranks ended with 0" in err
    said = [(login.run.attempt(0).out(rank)).read_text() for rank in range(4)]
    assert said == [f"hello from {rank} node{rank}\n" for rank in range(4)]


def test_a_waiting_run_says_why_and_can_be_stopped(login: BoxUser, full: str) -> None:
    process = start(login, "submit", job(), "--parsable")
    out, _ = process.communicate(timeout=DEADLINE_S)
    assert out.strip() == login.run.run_id
    wait_until(lambda: "Resources" in str(state_of(login)["message"]), "the reason")
    assert (state_of(login)["state"], state_of(login)["sure"]) == ("starting", True)
    code, out, _ = login.call("stop")
    assert (code, "stopped (130)" in out) == (0, True)
    assert [line.split()[0] for line in login.queued()] == [full]


def test_ctrl_c_takes_a_waiting_job_out_of_the_queue(login: BoxUser, full: str) -> None:
    process = start(login, "run", job())
    wait_until(lambda: is_queued(login, "PENDING"), "a waiting job", every_s=0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert "stopped by Ctrl-C while Slurm job" in err
    assert not is_queued(login, "PENDING")


def test_ctrl_c_stops_a_running_job_and_leaves_nothing(login: BoxUser) -> None:
    process = start(login, "run", job())
    login.wait_for("started")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    wait_until(lambda: not login.queued(), "an empty queue", every_s=0.2)


def test_a_run_that_can_never_start_is_refused_in_the_end(login: BoxUser, monkeypatch: pytest.MonkeyPatch) -> None:
    start(login, "submit", job(nodes=9)).communicate(timeout=DEADLINE_S)
    monkeypatch.setattr(slurm_follow, "HOPELESS_S", 2.0)
    monkeypatch.setattr(slurm_follow, "ASK_S", 0.5)
    assert slurm_follow.follow(login.run, Console(quiet=True)) == 78
    assert "would never start" in login.wait_for("ended")["message"]


def test_a_time_limit_is_said_before_slurm_kills(login: BoxUser) -> None:
    words = ("--set", "slurm.time=2", "--set", "slurm.signal_s=59")
    process = start(login, "run", job(), *words)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 124
    assert "time limit" in login.wait_for("ended")["message"]


def power_off_the_supervisor(login: BoxUser) -> str:
    """Cut the power of the node where the run's supervisor is; return its name."""
    login.wait_for("started")
    where = login.box.client("squeue", "--noheader", "--format=%B", f"--jobs={login.job.job_id}").stdout.strip()
    login.box.fail(where, "power")
    return where


def test_the_end_of_the_supervisors_node_ends_the_run(login: BoxUser) -> None:
    """Slurm would leave the job running on the node that is left (see slurm.states.is_orphan)."""
    process = start(login, "run", job(), "--set", "slurm.requeue=false")
    where = power_off_the_supervisor(login)
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode != 0, err
        wait_until(lambda: not login.queued(), "an empty queue", every_s=0.2)
    finally:
        login.box.heal(where)


@pytest.mark.soak
def test_a_run_that_may_be_queued_again_begins_anew_without_the_node_of_its_supervisor(login: BoxUser) -> None:
    process = start(login, "run", job(code="import os, time; print('rank', os.environ['RANK']); time.sleep(5)"))
    where = power_off_the_supervisor(login)
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        assert login.run.attempt_numbers() == [0, 1]
        placement = json.loads(login.run.attempt(1).placement.read_text())
        assert where not in [node["host"] for node in placement["nodes"]]
    finally:
        login.box.heal(where)


def test_a_run_that_is_queued_again_is_shown_as_waiting(login: BoxUser) -> None:
    """Its last row says "stopped": who believed that would start a second one."""
    code, out, err = ended(start(login, "submit", job()))
    assert code == 0, err
    login.wait_for("started")
    assert out.startswith(f"{login.run.run_id} is Slurm job {login.job.job_id}; muster logs -f ")
    requeued = login.box.client("scontrol", "requeue", login.job.job_id)
    assert requeued.returncode == 0, requeued.stderr
    assert login.wait_for("ended")["code"] == 130
    wait_until(lambda: state_of(login)["state"] == "starting", "a waiting run")
    assert "queued again" in state_of(login)["message"]
