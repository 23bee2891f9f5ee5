"""`--on submitit`: its local and debug executors here, its Slurm executor in a box, and what each is ordered to do."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.slurm import SlurmSettings
from muster.launch.common.processes import of_run
from muster.launch.scheduler.submitit_order import slurm_parameters
from support.box import BoxUser, ended
from support.live import LiveRun, argv, parent_of, wait_until

pytestmark = [pytest.mark.command, pytest.mark.slow]

LOCAL = ("--on", "submitit", "--executor", "local")
DEBUG = ("--on", "submitit", "--executor", "debug")
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


def test_an_executor_of_another_transport_is_refused(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job_of("pass"), "--executor", "local")
    assert live.end() == exits.USAGE
    assert live.err == "muster: --executor local: applies only to --on submitit; add that, or remove it\n"


def test_help_does_not_import_submitit() -> None:
    code = (
        "import sys; from muster.launch.cli import main\n"
        "for words in ([], ['run', '--help'], ['submit', '--help'], ['sweep', '--help']): main(words)\n"
        "sys.exit('submitit' in sys.modules or 'cloudpickle' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert done.returncode == 0


# Here ---------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("executor", [LOCAL, DEBUG], ids=["local", "debug"])
def test_pretend_nodes_run_as_over_any_transport(tmp_path: Path, executor: tuple[str, ...]) -> None:
    code = "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'LOCAL_RANK')))"
    live = LiveRun(tmp_path, job_of(code), *executor)
    assert live.end() == 0, live.err
    assert live.out == "0 4 0 0\n"
    logs = [live.run.attempt(0).out(rank).read_text().split() for rank in range(4)]
    assert logs == [f"{rank} 4 {rank // 2} {rank % 2}".split() for rank in range(4)]
    assert "4 ranks ended with 0" in live.err
    assert live.events("submitted")[-1]["transport"] == "submitit"
    assert list(live.run.submitit.glob("*_0_log.out"))
    assert live.left() == []


@pytest.mark.ranks
@pytest.mark.parametrize("executor", [LOCAL, pytest.param(DEBUG, marks=pytest.mark.soak)], ids=["local", "debug"])
def test_the_first_failing_ranks_code_comes_back(tmp_path: Path, executor: tuple[str, ...]) -> None:
    code = "import os, time; rank = os.environ['RANK']; time.sleep(1000 * (rank != '2')); exit(7)"
    live = LiveRun(tmp_path, job_of(code), *executor)
    assert live.end() == 7
    assert live.verdict()["first"]["rank"] == 2
    assert "rank 2 on node 1" in live.err
    assert live.left() == []


@pytest.mark.ranks
def test_ranks_meet_and_train(tmp_path: Path) -> None:
    text = "nodes: 2\nbench: {operation: hello}\n"
    live = LiveRun(tmp_path, text, *LOCAL)
    assert live.end() == 0, live.err
    assert "all ranks joined" in live.err


@pytest.mark.ranks
def test_the_signal_before_the_end_queues_the_run_again_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job_of(AGAIN), *LOCAL)
    for rank in (0, 3):  # rank 0, which is shown, and the last
        live.wait_for_output("attempt 0", rank)
    os.kill(task_0(live.run), signal.SIGUSR2)
    assert live.end() == 0, live.err
    assert attempts(live.run) == [(0, "requeue"), (1, "done")]
    assert live.out == "attempt 0\nattempt 1\n"
    assert not live.run.stop.exists()
    assert live.left() == []


@pytest.mark.ranks
@pytest.mark.parametrize("executor", [LOCAL, DEBUG], ids=["local", "debug"])
def test_ctrl_c_stops_the_run(tmp_path: Path, executor: tuple[str, ...]) -> None:
    live = LiveRun(tmp_path, job_of(SLEEP), *executor)
    live.wait_for_output("ready", 3)
    live.interrupt()
    assert live.end() == exits.STOPPED
    assert attempts(live.run) == [(0, "stopped")]
    assert live.left() == []


@pytest.mark.ranks
def test_muster_stop_ends_a_run_that_was_left(tmp_path: Path) -> None:
    from muster.launch.cli import main

    (tmp_path / "job.yaml").write_text(job_of(SLEEP))
    runs = str(tmp_path / "runs")
    submit = [
        sys.executable,
        "-m",
        "muster",
        "submit",
        str(tmp_path / "job.yaml"),
        *LOCAL,
        "--runs",
        runs,
        "--parsable",
    ]
    done = subprocess.run(submit, capture_output=True, text=True, timeout=50, check=True)
    run = RunDir(tmp_path / "runs" / done.stdout.strip())
    wait_until(lambda: run.attempt(0).out(3).is_file(), "the ranks")
    assert main(["stop", "--runs", runs]) == 0
    assert attempts(run) == [(0, "stopped")]
    wait_until(lambda: not of_run(run.run_id) and not controllers(run), "the end of all")


def controllers(run: RunDir) -> list[int]:
    """The processes of submitit that name a run's folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended while we looked
            continue
        if str(run.submitit).encode() in words:
            found.append(int(entry.name))
    return found


@pytest.mark.ranks
def test_nothing_is_left_when_submitits_own_controller_is_killed(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job_of(SLEEP), *LOCAL)
    live.wait_for_output("ready", 3)
    run = live.run
    os.kill(parent_of(task_0(run)), signal.SIGKILL)
    assert live.end() == exits.STOPPED  # its supervisor is told, and has the last word
    wait_until(lambda: not of_run(run.run_id) and not controllers(run), "the end of all")


def test_debug_cannot_be_left(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job_of("pass"), *DEBUG, "--detach")
    assert live.end() == exits.USAGE
    assert "--executor debug: runs in the calling process" in live.err


@pytest.mark.ranks
def test_an_interpreter_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("interpreter: /usr/bin/false\n")
    live = LiveRun(tmp_path, job_of("pass"), *LOCAL, "--site", str(tmp_path / "site.yaml"))
    assert live.end() != 0
    assert live.err.count("\n") == 1


# In a box -----------------------------------------------------------------------------------------------------------


def start(user: BoxUser, verb: str, text: str, *words: str) -> subprocess.Popen[str]:
    return user.start(verb, text, "--on", "submitit", "--executor", "slurm", *words)


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
