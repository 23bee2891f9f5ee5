"""Slurm itself, in the box: our words against a real controller, real nodes and real failures."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster.jobs.basics.errors import RefusedError, UnreachableError
from muster.jobs.hosts.launchers import in_step
from muster.jobs.spec.slurm import SlurmSettings
from muster.slurm.allocation import inside_allocation, read_allocation
from muster.slurm.client import Client, SubmissionRefusedError
from muster.slurm.refusals import refusal
from muster.slurm.script import sbatch_text
from muster.slurm.states import JobState, is_hopeless, is_orphan, outcome
from muster.slurm.steps import srun_argv
from support.box import LiveBox

pytestmark = [pytest.mark.command, pytest.mark.cluster, pytest.mark.timeout(180)]

DEADLINE_S = 90.0


class Queue:
    """Submits scripts to the box and waits for what becomes of them; what is left is cancelled."""

    def __init__(self, box: LiveBox, folder: Path) -> None:
        self.client = Client({**os.environ, **box.environment})
        self.folder = folder
        self.job_ids: list[str] = []

    def submit(
        self, *argv: str, nodes: int = 1, folder: Path | None = None, name: str = "test", **settings: object
    ) -> str:
        """Submit a batch script that runs `argv`."""
        where = folder or self.folder
        where.mkdir(parents=True, exist_ok=True)
        text = sbatch_text(name=name, folder=where, nodes=nodes, argv=argv, settings=SlurmSettings(**settings))
        script = where / f"{name}.sh"
        script.write_text(text)
        self.job_ids.append(self.client.submit(script, name=name).job_id)
        return self.job_ids[-1]

    def wait(self, job_id: str, condition: Callable[[JobState], object]) -> JobState:
        """Wait until a job is as the test wants it."""
        deadline = time.monotonic() + DEADLINE_S
        state = None
        while time.monotonic() < deadline:
            state = self.client.query([job_id]).get(job_id)
            if state is not None and condition(state):
                return state
            time.sleep(0.2)
        pytest.fail(f"job {job_id} stayed {state}")

    def over(self, job_id: str) -> JobState:
        """Wait until a job is over."""
        return self.wait(job_id, lambda state: state.phase == "over")

    def output(self, job_id: str) -> str:
        """Return what its batch script printed."""
        path = self.folder / f"slurm-{job_id}.out"
        return path.read_text() if path.exists() else ""  # Slurm makes it a moment after the job runs

    def cancel(self) -> None:
        for job_id in self.job_ids:
            self.client.cancel(job_id)
            self.over(job_id)


@pytest.fixture
def queue(box: LiveBox, tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(box, tmp_path / "work")
    yield queue
    queue.cancel()


@pytest.mark.parametrize(
    "name", ["a b", "50% %j", "it's", 'say "x"', "back\\slash \\\\", "$(id) `id` #;&", "ÿ→ü", "a packjob b"]
)
def test_folder_comment_and_arguments_arrive_byte_for_byte(queue: Queue, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name.replace("\\", "")
    job_id = queue.submit("printf", "%s\\n", name, "", folder=folder, comment=name)
    state = queue.over(job_id)
    assert (state.state, state.exit_code) == ("COMPLETED", 0)
    assert (folder / f"slurm-{job_id}.out").read_text() == f"{name}\n\n"
    shown = subprocess.run(
        ["scontrol", "show", "job", job_id],
        env=queue.client.environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert f"\n   Comment={name}\n" in shown.stdout.replace(" \n", "\n")


def test_an_allocation_is_read_in_the_batch_script_and_a_node_in_its_step(queue: Queue) -> None:
    show = "import json, os; json.dump(dict(os.environ), open(os.environ['KIND'] + os.environ['SLURM_PROCID'], 'w'))"
    step = srun_argv(nodes=2, argv=["env", "KIND=task", sys.executable, "-c", show], cpus_per_task=2)
    script = shlex.join(["env", "KIND=batch", sys.executable, "-c", show]) + f" && {shlex.join(step)}"
    job_id = queue.submit("sh", "-c", script, nodes=2, cpus_per_task=2)
    assert queue.over(job_id).exit_code == 0, queue.output(job_id)
    batch, *tasks = (json.loads((queue.folder / name).read_text()) for name in ("batch0", "task0", "task1"))
    assert inside_allocation(batch)
    assert not in_step(batch)
    assert (read_allocation(batch).job_id, len(read_allocation(batch).nodes)) == (job_id, 2)
    assert read_allocation(batch).cpus == (2, 2)
    assert all(map(in_step, tasks))
    numbers = [int(task["SLURM_NODEID"]) for task in tasks]
    assert sorted(numbers) == [0, 1]
    assert [read_allocation(batch).nodes[number] for number in numbers] == [task["SLURMD_NODENAME"] for task in tasks]


def test_a_job_waits_then_is_cancelled(queue: Queue) -> None:
    first = queue.submit("sleep", "60", nodes=4, name="first", exclusive=True)
    queue.wait(first, lambda state: state.phase == "running")
    second = queue.submit("true", nodes=4, name="second", exclusive=True)
    state = queue.wait(second, lambda state: state.reason == "Resources")
    assert (state.phase, is_hopeless(state), state.name) == ("pending", False, "second")
    both = queue.client.query([first, second, "999999"])
    assert [both[each].phase for each in (first, second)] == ["running", "pending"]
    assert "999999" not in both
    for job_id in (second, first):
        queue.client.cancel(job_id)
        assert outcome(queue.over(job_id)).code == 130


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        (
            {"partition": "nosuch"},
            "slurm.partition: sbatch says: invalid partition specified: nosuch; .* available: batch",
        ),
        ({"mem": "900G"}, "slurm.mem: sbatch says: Memory specification can not be satisfied"),
        ({"constraint": "nosuch"}, "slurm.constraint: sbatch says: Invalid feature"),
        ({"nodelist": "nosuch"}, "slurm.nodelist: sbatch says: Invalid node name"),
        ({"reservation": "nosuch"}, "slurm.reservation: sbatch says: Requested reservation is invalid"),
        ({"gpus_per_node": 2}, "slurm.gpus_per_node: sbatch says: Invalid generic resource"),
        ({"extra": ["--nosuch=1"]}, "slurm.extra: sbatch says: unrecognized option '--nosuch=1'"),
    ],
)
def test_what_sbatch_refuses_names_its_setting(queue: Queue, settings: dict, where: str) -> None:
    with pytest.raises(SubmissionRefusedError) as caught:
        queue.submit("true", **settings)
    error = refusal(str(caught.value), SlurmSettings(**settings), 1, partitions=queue.client.partitions())
    with pytest.raises(RefusedError, match=where):
        raise error


def test_a_folder_that_the_node_does_not_see_is_said_so(queue: Queue, tmp_path: Path) -> None:
    queue.folder = tmp_path / "gone"
    job_id = queue.submit("true", extra=["--begin=now+2"])
    (queue.folder / "test.sh").unlink()
    queue.folder.rmdir()
    result = outcome(queue.over(job_id))
    assert result.code == 73
    assert "put --runs on storage that all nodes share" in result.message


def test_a_missing_interpreter_is_said_so(queue: Queue) -> None:
    job_id = queue.submit("/nosuch/python", "-c", "pass")
    assert outcome(queue.over(job_id)).code == 127
    assert "not found" in queue.output(job_id)


def test_a_program_that_takes_too_much_memory_is_told_from_one_that_fails(queue: Queue) -> None:
    job_id = queue.submit(sys.executable, "-c", "x = bytearray(900 << 20); import time; time.sleep(30)", mem="100M")
    result = outcome(queue.over(job_id), queue.output(job_id))
    assert result.code == 1
    assert "raise slurm.mem" in result.message


def test_the_batch_script_itself_hears_that_its_time_is_up(queue: Queue) -> None:
    body = "import signal, sys; signal.sigwait([signal.SIGUSR2]); print('USR2'); sys.exit(9)"
    wait = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); {body}"
    job_id = queue.submit(sys.executable, "-c", wait, time=1, signal_s=55)
    assert queue.over(job_id).exit_code == 9
    assert queue.output(job_id).startswith("USR2\n")


def test_a_requeued_job_waits_again_and_appends(queue: Queue) -> None:
    job_id = queue.submit("sh", "-c", "echo start; exec sleep 60")
    queue.wait(job_id, lambda state: state.phase == "running" and "start" in queue.output(job_id))
    subprocess.run(["scontrol", "requeue", job_id], env=queue.client.environment, check=True, timeout=30)
    assert queue.wait(job_id, lambda state: state.phase == "pending").name == "test"
    assert queue.output(job_id).startswith("start\n")


@pytest.mark.soak
def test_a_failed_node_ends_a_job_and_orphans_one_that_was_to_go_on(box: LiveBox, queue: Queue) -> None:
    """With --no-kill Slurm takes even the node of the batch script out of the job, and leaves the rest running."""
    orphan = queue.submit("sleep", "120", nodes=2, name="orphan", nodelist="node[2-3]", mem="100M")
    single = queue.submit("sleep", "120", name="single", nodelist="node2", mem="100M", requeue=False)
    for job_id in (orphan, single):
        queue.wait(job_id, lambda state: state.phase == "running")
    box.fail("node2", "power")
    try:
        ended = queue.over(single)
        assert (ended.state, outcome(ended).code) == ("NODE_FAIL", 69)
        left = queue.wait(orphan, is_orphan)
        assert (left.nodes, left.batch_host, outcome(left).code) == ("node3", "node2", 69)
        queue.client.cancel(orphan)
        queue.over(orphan)
    finally:
        box.heal("node2")


def test_a_controller_that_is_not_there_is_unreachable(queue: Queue, tmp_path: Path) -> None:
    conf = Path(queue.client.environment["SLURM_CONF"])
    other = tmp_path / "slurm.conf"
    other.write_text("".join(f"{line}\n" for line in conf.read_text().splitlines() if "SlurmctldPort" not in line))
    with other.open("a") as file:
        file.write("SlurmctldPort=9\n")
    client = Client({**queue.client.environment, "SLURM_CONF": str(other)})
    with pytest.raises(UnreachableError, match="Unable to contact slurm controller"):
        client.cancel("1")
