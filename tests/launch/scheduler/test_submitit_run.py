"""`--on submitit`: what submitit is ordered to do, with commands of Slurm that are played, and in a box."""

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from submitit.core.utils import DelayedSubmission

from muster.jobs.basics import exits
from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir, list_runs, make_run
from muster.jobs.spec.slurm import SlurmSettings
from muster.launch.cli import main
from muster.launch.common.processes import of_run
from muster.launch.plan.submission import Submission
from muster.launch.records.slurm_job import SlurmJob, output_path
from muster.launch.scheduler.queueing import submit
from muster.launch.scheduler.submitit_order import slurm_parameters, task_of
from support.box import BoxUser, ended
from support.live import argv, parent_of, wait_until
from support.slurm_commands import FakeSlurm

pytestmark = [pytest.mark.command, pytest.mark.slow]

# Sleeps in its first attempt, and ends in every later one.
AGAIN = """
import os, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, flush=True)
time.sleep(1000 * (attempt == "0"))
"""
SLEEP = "import time; print('ready', flush=True); time.sleep(1000)"


def job_of(code: str, *, nodes: int = 2, ranks: int = 2, **keys: object) -> str:
    more = "".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items())
    return f"name: sub\nnodes: {nodes}\nranks_per_node: {ranks}\ngrace_s: 1\n{more}{argv(code)}"


def attempts(run: RunDir) -> list[tuple[int, str]]:
    return [(row["attempt"], row["class"]) for row in read_lines(run.attempts)]


def task_0(run: RunDir) -> int:
    """The process of submitit's first task: the parent of the supervisor."""
    submitted = [row for row in read_lines(run.events) if row["event"] == "submitted"][-1]
    return parent_of(submitted["pid"])


# What is ordered ----------------------------------------------------------------------------------------------------


def test_settings_become_submitits_parameters() -> None:
    settings = SlurmSettings(
        partition="gpu",
        account="lab",
        qos="high",
        time="1:30:30",
        mem="64G",
        gpus_per_node="a100:4",
        exclusive=True,
        reservation="maintenance",
        signal_s=90,
        requeue=False,
        extra=["--gres=disk:1", "--contiguous"],
    )
    assert slurm_parameters(settings, nodes=3, cores=8, entry=["python", "entry"]) == {
        "nodes": 3,
        "tasks_per_node": 1,
        "slurm_mem": "64G",
        "slurm_time": 91,
        "slurm_partition": "gpu",
        "slurm_account": "lab",
        "slurm_qos": "high",
        "slurm_exclusive": True,
        "slurm_signal_delay_s": 90,
        "slurm_additional_parameters": {
            "no-kill": True,
            "no-requeue": True,
            "chdir": "/",
            "gres": "disk:1",
            "contiguous": True,
            "gpus-per-node": "a100:4",
            "reservation": "maintenance",
        },
        "slurm_srun_args": [
            *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--input=none", "--export=ALL"),
            *("python", "entry"),
        ],
    }


def test_cores_are_said_again_to_srun() -> None:
    given = slurm_parameters(SlurmSettings(), nodes=1, cores=8, entry=[])
    assert given["cpus_per_task"] == 8
    assert "--cpus-per-task=8" in given["slurm_srun_args"]
    assert slurm_parameters(SlurmSettings(cpus_per_task=2), nodes=1, cores=8, entry=[])["cpus_per_task"] == 2


def test_help_does_not_import_submitit() -> None:
    code = (
        "import sys; from muster.launch.cli import main\n"
        "for words in ([], ['run', '--help'], ['submit', '--help'], ['sweep', '--help']): main(words)\n"
        "sys.exit('submitit' in sys.modules or 'cloudpickle' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert done.returncode == 0


# With played commands ------------------------------------------------------------------------------------------------


@pytest.fixture
def through(submission: Submission) -> Submission:
    return replace(submission, route=replace(submission.route, transport="submitit"))


def test_a_run_is_one_job_with_the_task_of_its_supervisor(through: Submission, slurm: FakeSlurm) -> None:
    run = through.context.run
    assert submit([through]).job_id == "12"
    job = SlurmJob.read(run)
    assert (job.job_id, job.name) == ("12", run.run_id)
    assert output_path(run, job).readlink() == run.submitit / "12_0_log.err"
    assert "muster.slurm.submitit_job" in (run.submitit / "12_submission.sh").read_text()
    assert DelayedSubmission.load(run.submitit / "12_submitted.pkl").function == task_of(through)


def test_runs_of_one_shape_are_one_array(through: Submission, slurm: FakeSlurm, tmp_path: Path) -> None:
    other = RunDir(through.context.run.path.with_name("demo-20250101T000001.000Z-abc123"))
    make_run(other)
    pair = [through, replace(through, context=replace(through.context, run=other))]
    folder = tmp_path / "runs" / "sweep-demo"
    folder.mkdir()
    submit(pair, name="sweep-demo-0", folder=folder, limit=1)
    assert [SlurmJob.read(each.context.run).job_id for each in pair] == ["12_0", "12_1"]
    submitit = RunDir(folder).submitit
    assert "#SBATCH --array=0-1%1\n" in (submitit / "12_submission.sh").read_text()
    tasks = [DelayedSubmission.load(submitit / f"12_{number}_submitted.pkl").function for number in range(2)]
    assert tasks == list(map(task_of, pair))


def test_what_slurm_refuses_ends_the_run(through: Submission, slurm: FakeSlurm) -> None:
    slurm.says(refuses="sbatch: error: invalid partition specified: main")
    with pytest.raises(RefusedError, match=r"slurm.partition: sbatch says: invalid"):
        submit([through])
    (ended_row,) = [row for row in read_lines(through.context.run.events) if row["event"] == "ended"]
    assert ended_row["code"] == exits.REFUSED


def test_a_machine_without_slurm_says_so(through: Submission, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RefusedError, match="srun is not on PATH here; run this on the cluster's login node"):
        submit([through])


@pytest.mark.ranks
def test_the_signal_before_the_end_queues_the_run_again_and_the_next_attempt_goes_on(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    (slurm.folder / "srun").write_text(f'#!/bin/sh\nwhile [ "$1" != {sys.executable} ]; do shift; done\nexec "$@"\n')
    (tmp_path / "job.yaml").write_text(job_of(AGAIN, nodes=1))
    assert main(["submit", str(tmp_path / "job.yaml"), "--on", "submitit", "--runs", str(tmp_path / "runs")]) == 0
    (run,) = list_runs(tmp_path / "runs")
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0"}

    def start(restarts: int) -> "subprocess.Popen[bytes]":
        more = {"SLURM_JOB_CPUS_PER_NODE": "2", "SLURM_RESTART_COUNT": str(restarts)}
        return subprocess.Popen(["bash", run.submitit / "12_submission.sh"], env={**os.environ, **job, **more})

    with start(0) as process:
        for rank in range(2):
            log = run.attempt(0).out(rank)
            wait_until(lambda log=log: log.is_file() and "attempt 0" in log.read_text(), f"rank {rank}")
        os.kill(task_0(run), signal.SIGUSR2)
    assert process.returncode != 0
    assert slurm.calls("scontrol")[-1] == ["scontrol", "requeue", "12"]
    with start(1) as process:
        pass
    assert process.returncode == 0
    assert attempts(run) == [(0, "requeue"), (1, "done")]
    assert not run.stop.exists()
    assert not of_run(run.run_id)


# In a box -----------------------------------------------------------------------------------------------------------


def start(user: BoxUser, verb: str, text: str, *words: str) -> subprocess.Popen[str]:
    return user.start(verb, text, "--on", "submitit", *words)


def is_gone(user: BoxUser) -> bool:
    """Say whether the newest run's job is over for Slurm, too."""
    return not set(user.queued(f"--jobs={user.job.job_id}", "--format=%T")) - {"COMPLETED", "CANCELLED", "FAILED"}


cluster = pytest.mark.cluster
patient = pytest.mark.timeout(180)


@cluster
@patient
def test_in_slurm_every_node_has_its_ranks_and_the_code_comes_back(user: BoxUser) -> None:
    program = (
        "import os, socket, time; print(socket.gethostname(), os.environ['MASTER_ADDR'], flush=True)\n"
        f"ours = {str(user.folder)!r}; open(ours + '/rank' + os.environ['RANK'], 'w').close()\n"
        "deadline = time.monotonic() + 60\n"
        "while time.monotonic() < deadline and not all(os.path.exists(f'{ours}/rank{rank}') for rank in range(4)):\n"
        "    time.sleep(0.05)\n"
        "exit(9 * (os.environ['RANK'] == '3'))"
    )
    code, _, err = ended(start(user, "run", job_of(program, nodes=4, ranks=1)))
    assert code == 9, err
    folder = user.run.attempt(0)
    said = [folder.out(rank).read_text().split() for rank in range(4)]
    assert [name for name, _ in said] == [f"node{node}" for node in range(4)]
    assert len({address for _, address in said}) == 1
    assert not said[0][1].startswith("127.")
    wait_until(lambda: is_gone(user), "the end of the job")


@cluster
@patient
@pytest.mark.soak
def test_in_slurm_the_signal_before_the_end_queues_the_job_again(user: BoxUser) -> None:
    process = start(user, "run", job_of(AGAIN))
    for rank in (0, 3):  # rank 0, which is shown, and the last
        user.wait_for_output("attempt 0", rank)
    user.box.client("scancel", "--signal=USR2", user.job.job_id)
    code, out, err = ended(process)
    assert code == 0, err
    assert out == "attempt 0\nattempt 1\n"
    assert attempts(user.run) == [(0, "requeue"), (1, "done")]


@cluster
@patient
def test_in_slurm_a_waiting_run_is_cancelled_by_muster_stop(user: BoxUser) -> None:
    code, out, err = ended(start(user, "submit", job_of("pass", slurm={"extra": ["--begin=now+1hour"]})))
    assert code == 0, err
    job_id, run_id = user.job.job_id, user.run.run_id
    assert out.startswith(f"{run_id} is Slurm job {job_id}; muster logs -f ")
    assert user.queued(f"--jobs={job_id}", "--format=%T") == ["PENDING"]
    assert user.call("stop", run_id)[0] == 0
    assert [row["code"] for row in read_lines(user.run.events) if row["event"] == "ended"] == [exits.STOPPED]
    wait_until(lambda: is_gone(user), "the end of the job")


@cluster
@patient
def test_in_slurm_ctrl_c_ends_the_run_and_the_job(user: BoxUser) -> None:
    process = start(user, "run", job_of(SLEEP))
    user.wait_for_output("ready", 3)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == exits.STOPPED, err
    wait_until(lambda: is_gone(user), "the end of the job")


@cluster
@patient
def test_what_sbatch_refuses_is_one_message_and_the_runs_end(user: BoxUser) -> None:
    code, _, err = ended(start(user, "run", job_of("pass", slurm={"partition": "nowhere"})))
    assert code == exits.REFUSED, err
    (line,) = err.splitlines()
    assert line.startswith("muster: slurm.partition: sbatch says: ")
    assert "nowhere" in line
    assert user.wait_for("ended")["code"] == exits.REFUSED


@cluster
@patient
def test_a_dry_run_shows_the_script_and_submits_nothing(user: BoxUser) -> None:
    code, out, err = ended(start(user, "submit", job_of("pass"), "--dry-run"))
    assert code == 0, err
    words: list[Any] = [shlex.split(line) for line in out.splitlines() if line.startswith("srun ")]
    assert "muster.slurm.submitit_job" in words[0]
    assert "#SBATCH --nodes=2" in out
    assert not user.runs.exists()
