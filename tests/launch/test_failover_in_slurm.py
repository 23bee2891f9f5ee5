"""A training in the real Slurm of the box that is told to end, loses a node, an agent, or its nodes to another job."""

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.boot import CODE_ROOT
from muster.jobs.basics.files import read_lines
from support import live
from support.box import BoxUser, LiveBox
from support.exact_jobs import tokens

pytestmark = [pytest.mark.command, pytest.mark.cluster, pytest.mark.timeout(240)]

DEADLINE_S = 120.0
JOB = CODE_ROOT / "jobs" / "examples" / "failover.yaml"
SETTINGS = (
    "steps=100000",
    "log_every=1000",
    "model.vocabulary=64",
    "model.context=32",
    f"data={json.dumps(tokens(pause_s=0.02))}",
)
# Its steps wait more than they compute: 0.16 s each.
LONG = ("--set", "threads_per_rank=1", *(word for each in SETTINGS for word in ("--set", f"train.{each}")))
RARELY = ("--set", "checkpoint.every_s=null", "--set", "checkpoint.every_steps=1000000")
PROGRAM = """
import json, os, signal, sys, time
def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm and the agent may both send it
    while not os.path.exists(os.environ["MUSTER_STOP_FILE"]):  # where Slurm itself has sent the signal
        time.sleep(0.01)
    told = json.load(open(os.environ["MUSTER_STOP_FILE"]))
    print(told["reason"], told["deadline"] - time.time(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(1000)
"""
SESSION_PROGRAM = CODE_ROOT / "tests" / "support" / "own_program.py"
BLOCKER = "#!/bin/sh\n#SBATCH --nodes=4 --exclusive --output=/dev/null --partition=batch\nexec sleep 5\n"


wait_until = functools.partial(live.wait_until, deadline_s=DEADLINE_S)


class Training(BoxUser):
    """A training that was submitted; it ends with the test."""

    def __init__(self, box: LiveBox, folder: Path, *words: str, job: Path = JOB) -> None:
        super().__init__(box, folder)
        submit = ("submit", str(job), "--on", "slurm", "--hosts", box.spelt)
        code, _, err = self.call(*submit, *(LONG if job == JOB else ()), *words)
        assert code == 0, err

    def events(self, name: str, attempt: int | None = None) -> list[dict[str, Any]]:
        rows = [row for row in read_lines(self.run.events) if row["event"] == name]
        return [row for row in rows if attempt is None or row.get("attempt") == attempt]

    def saved(self, attempt: int) -> int:
        """Wait until an attempt has saved, and return after which step."""
        wait_until(lambda: self.events("saved", attempt), f"a checkpoint of attempt {attempt}")
        return int(self.events("saved", attempt)[-1]["step"])

    def begun_from(self, attempt: int) -> int:
        """Wait until an attempt goes on from a checkpoint and saves again; return the step that it began from."""
        self.saved(attempt)
        return int(self.events("resuming", attempt)[-1]["step"])

    def ended(self, attempt: int) -> dict[str, Any]:
        """Return the row of an attempt that is over."""
        wait_until(lambda: self.events("attempt_ended", attempt), f"the end of attempt {attempt}")
        return self.events("attempt_ended", attempt)[-1]

    def hosts(self, attempt: int) -> list[str]:
        placement = json.loads(self.run.attempt(attempt).placement.read_text())
        return [node["host"] for node in placement["nodes"]]

    def client(self, *words: str) -> str:
        done = self.box.client(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        super().close()
        wait_until(lambda: not self.queued(), "an empty queue", every_s=0.2)


@pytest.fixture
def trainings(box: LiveBox, tmp_path: Path) -> Iterator[list[Training]]:
    """Those that a test has submitted."""
    submitted: list[Training] = []
    yield submitted
    for each in submitted:
        each.close()


@pytest.fixture
def train(box: LiveBox, tmp_path: Path, trainings: list[Training]) -> Any:
    """Return a function that submits a training."""

    def start(*words: str, job: Path = JOB) -> Training:
        trainings.append(Training(box, tmp_path, *words, job=job))
        return trainings[-1]

    return start


def test_the_signal_before_the_time_limit_saves_and_queues_it_again(train: Any) -> None:
    training: Training = train()
    training.saved(0)
    training.client("scancel", "--batch", "--signal=USR2", training.job.job_id)
    ended = training.ended(0)
    assert (ended["code"], "saved after step" in ended["message"]) == (75, True)
    last = training.saved(0)
    assert training.begun_from(1) == last
    assert [row["restarts"] for row in training.events("allocation")] == [0, 1]
    assert training.events("warning") == []  # Slurm's count of starts is ours


@pytest.mark.parametrize(
    "end",
    [("scancel",), pytest.param(("scontrol", "requeue"), marks=pytest.mark.soak)],  # a program below: queued again
    ids=["scancel", "requeue"],
)
def test_a_job_that_is_cancelled_or_queued_again_saves_first(train: Any, end: tuple[str, ...]) -> None:
    """Slurm signals agents and supervisor an instant apart."""
    training: Training = train(*RARELY)
    wait_until(lambda: training.events("first_step", 0), "a first step")
    training.client(*end, training.job.job_id)
    ended = training.ended(0)
    assert ended["message"].endswith(f"saved after step {training.saved(0)}")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A job file of a program that prints why and for how long it may save."""
    path = tmp_path / "program.yaml"
    path.write_text(f"nodes: 2\nranks_per_node: 1\nrestart: {{}}\ncommand: {json.dumps(['python', '-c', PROGRAM])}\n")
    return path


def told(training: Training) -> tuple[str, float]:
    """Wait until attempt 0 of a program is over and the job is queued again; return what rank 0 was told."""
    assert training.ended(0)["code"] == 75
    wait_until(lambda: training.events("requeueing"), "a requeue")
    _, *reason, left_s = training.run.attempt(0).out(0).read_text().split()
    return " ".join(reason), float(left_s)


def ready(training: Training) -> None:
    files = [training.run.attempt(0).out(rank) for rank in range(2)]
    wait_until(lambda: all(file.is_file() and file.read_text() for file in files), "a program that is ready")


def test_a_program_has_the_time_to_the_limit_and_is_queued_again(train: Any, program: Path) -> None:
    training: Training = train("--set", "slurm.signal_s=50", job=program)
    ready(training)
    training.client("scancel", "--batch", "--signal=USR2", training.job.job_id)
    reason, left_s = told(training)
    assert reason == "time limit"
    assert left_s > 20.0  # and not the 5 s of grace_s


def test_a_program_has_the_whole_grace_of_a_preemption_and_is_queued_again(
    train: Any, program: Path, tmp_path: Path
) -> None:
    training: Training = train("--set", "slurm.partition=preempt", job=program)
    training.client("scontrol", "update", "PartitionName=preempt", "GraceTime=40")
    ready(training)
    (tmp_path / "blocker.sh").write_text(BLOCKER)
    try:
        training.client("sbatch", str(tmp_path / "blocker.sh"))
        reason, left_s = told(training)
        assert reason == "preempted"
        assert left_s > 10.0
    finally:
        training.client("scontrol", "update", "PartitionName=preempt", "GraceTime=0")


@pytest.mark.parametrize("end", [pytest.param("time limit", marks=pytest.mark.soak), "requeue"])
def test_a_program_with_a_session_saves_and_goes_on_as_a_training(train: Any, tmp_path: Path, end: str) -> None:
    """It needs no restart: to go on after the time limit: it has said that it can."""
    command = [sys.executable, str(SESSION_PROGRAM), "100000", "50"]
    path = tmp_path / "session.yaml"
    path.write_text(f"nodes: 2\nranks_per_node: 1\ncommand: {json.dumps(command)}\n")
    training: Training = train("--set", "slurm.signal_s=50", job=path)
    training.saved(0)
    words = ("scancel", "--batch", "--signal=USR2") if end == "time limit" else ("scontrol", "requeue")
    training.client(*words, training.job.job_id)
    ended = training.ended(0)
    assert ended["message"].endswith(f"saved after step {training.saved(0)}")
    assert training.begun_from(1) == training.saved(0)


@pytest.mark.soak
def test_what_an_operator_queues_again_goes_on_from_its_last_checkpoint(train: Any) -> None:
    training: Training = train()
    training.saved(0)
    training.client("scontrol", "requeue", training.job.job_id)
    training.ended(0)
    assert training.begun_from(1) >= 10
    assert len(training.events("allocation")) == 2


@pytest.mark.soak
def test_a_lost_node_is_replaced_by_a_spare_inside_the_allocation(train: Any, box: LiveBox) -> None:
    training: Training = train("--set", "restart.spares=1", "--set", "restart.min_nodes=2")
    training.saved(0)
    assert training.hosts(0) == ["node0", "node1"]
    box.fail("node1", "power")
    try:
        assert training.begun_from(1) >= 10
        assert training.hosts(1) == ["node0", "node2"]
        assert len(training.events("allocation")) == 1
    finally:
        box.heal("node1")


def test_after_a_lost_node_the_others_go_on_without_leaving_the_queue(train: Any, box: LiveBox) -> None:
    training: Training = train()
    training.saved(0)
    box.fail("node1", "power")
    try:
        assert training.begun_from(1) >= 10
        assert training.hosts(1) == ["node0"]
        # Slurm itself notices later, and takes only the node out of the job.
        state = ("squeue", "--noheader", "--format=%T %N")
        wait_until(lambda: training.client(*state).strip() == "RUNNING node0", "Slurm's word on it", every_s=0.2)
        before = training.saved(1)
        wait_until(lambda: training.saved(1) > before, "a training that goes on")
        assert len(training.events("allocation")) == 1
    finally:
        box.heal("node1")


@pytest.mark.soak
def test_a_lost_agent_is_started_again_by_a_step_of_its_own(train: Any, box: LiveBox) -> None:
    training: Training = train("--set", "restart.min_nodes=2")
    training.saved(0)
    record = json.loads(training.run.attempt(0).node(1).read_text())
    pid = str(record["pid"])
    done = box.command("exec", "--name", box.name, record["host"], "--", "kill", "-9", pid)
    assert done.returncode == 0, done.stderr
    assert training.begun_from(1) >= 10
    assert training.hosts(1) == ["node0", "node1"]
    steps = training.client("squeue", "--steps", "--noheader", "--format=%i %N").split("\n")
    assert any(step.split() == [f"{training.job.job_id}.1", "node1"] for step in steps if step)


def test_the_first_nodes_end_queues_it_again_and_it_goes_on_elsewhere(train: Any, box: LiveBox) -> None:
    training: Training = train()
    training.saved(0)
    box.fail("node0", "power")
    try:
        assert training.begun_from(1) >= 10
        assert "node0" not in training.hosts(1)
        assert len(training.events("allocation")) == 2
    finally:
        box.heal("node0")


@pytest.mark.soak
def test_a_preemption_with_grace_saves_first(train: Any, box: LiveBox, tmp_path: Path) -> None:
    """Slurm signals every process of the steps, ranks and all; then it waits."""
    training: Training = train("--set", "slurm.partition=preempt")
    training.client("scontrol", "update", "PartitionName=preempt", "GraceTime=20")
    training.saved(0)
    (tmp_path / "blocker.sh").write_text(BLOCKER)
    try:
        training.client("sbatch", str(tmp_path / "blocker.sh"))
        assert training.ended(0)["code"] == 75
        last = training.saved(0)
        assert training.begun_from(1) == last
        assert len(training.events("allocation")) == 2
    finally:
        training.client("scontrol", "update", "PartitionName=preempt", "GraceTime=0")
