"""Which run a program continues after a requeue by Slurm or a restart by torchrun: its own, not another program's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import Programs

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PROGRAM = """
import os, sys, time, muster
rate, total, *how = sys.argv[1:]
run = muster.session(os.environ.get("OWN_NAME"))
state = run.state(rate=float(rate))
for _ in run.steps(int(total), state):
    if "fail" in how and not os.environ.get("SLURM_RESTART_COUNT"):
        sys.exit("failed")
    if "wait" in how:
        print("begun", flush=True)
        sys.stdin.readline()
print(f"RUN {run.folder.name} rate {state.rate}", flush=True)
"""


class Job:
    """One Slurm job, whose batch script starts programs. Only its variables are there, no Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "MUSTER_RUNS": str(folder / "runs"), "SLURM_JOB_ID": "77"}
        (folder / "train.py").write_text(PROGRAM)

    def start(self, *words: str, name: str = "", folder: str = ".") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.folder / "train.py"), *words],
            cwd=self.folder / folder,
            env=self.env | ({"OWN_NAME": name} if name else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, name: str = "", folder: str = ".") -> tuple[int, str]:
        process = self.start(*words, name=name, folder=folder)
        said, _ = process.communicate(timeout=100)
        return process.returncode, said

    def end(self, *words: str, **options: str) -> str:
        """Run a program that ends well; return its last line."""
        code, said = self.run(*words, **options)
        assert code == 0, said
        return said.splitlines()[-1]

    def requeue(self) -> None:
        self.env["SLURM_RESTART_COUNT"] = str(int(self.env.get("SLURM_RESTART_COUNT", 0)) + 1)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_programs_of_a_requeued_job_continue_their_own_runs(job: Job) -> None:
    (job.folder / "other").mkdir()
    programs = [("0.1", "3"), ("0.2", "3")]
    before = [job.end(*words) for words in programs] + [job.end(*programs[0], folder="other")]
    assert len({line.split()[1] for line in before}) == 3
    for _ in range(2):
        job.requeue()
        assert [job.end(*words) for words in programs] + [job.end(*programs[0], folder="other")] == before
    said = job.run("0.3", "3")[1]
    assert "but from another folder or with another command line or name, so a new run begins" in said
    assert said.splitlines()[-1] not in before


def test_the_second_of_two_equal_programs_needs_a_name(job: Job) -> None:
    first = job.end("0.1", "3")
    code, said = job.run("0.1", "3")
    assert code == 78
    assert f"slurm 77 has begun {first.split()[1]} with the same folder and command line" in said
    assert 'muster.session("NAME")' in said
    second = job.end("0.1", "3", name="second")
    job.requeue()
    assert job.end("0.1", "3") == first
    assert job.run("0.1", "3")[0] == 78
    assert job.end("0.1", "3", name="second") == second


def test_equal_programs_side_by_side(job: Job) -> None:
    first = job.start("0.1", "1", "wait")
    assert first.stdout is not None
    while "begun" not in first.stdout.readline():
        pass
    assert job.run("0.1", "1", "wait")[0] == 78
    other = job.start("0.2", "1", "wait")
    lines = [each.communicate("go on\n", timeout=100)[0].splitlines()[-1] for each in (first, other)]
    job.requeue()
    both = [job.start(rate, "1", "wait") for rate in ("0.1", "0.2")]
    assert [each.communicate("", timeout=100)[0].splitlines()[-1] for each in both] == lines


def test_a_batch_script_may_start_a_program_again_after_a_failure(job: Job) -> None:
    assert job.run("0.1", "3", "fail")[0] == job.run("0.1", "3", "fail")[0] == 1
    newest = sorted(each.name for each in (job.folder / "runs").glob("train-*"))
    assert len(newest) == 2
    killed = job.start("0.1", "3", "fail", "wait", name="killed")
    killed.kill()
    killed.communicate(timeout=100)
    assert job.run("0.1", "3", "fail", "wait", name="killed")[0] == 1
    job.requeue()
    assert job.end("0.1", "3", "fail").split()[1] == newest[-1]


def test_salloc_is_for_trying_things_again(job: Job) -> None:
    job.env["SLURM_JOB_NAME"] = "interactive"
    assert job.end("0.1", "3") != job.end("0.1", "3")


WITH_ANOTHER = """
import os, subprocess, sys, muster
run = muster.session()
state = run.state(rate=float(sys.argv[2]))
for _ in run.steps(2, state):
    pass
print(f"RUN {run.folder.name} rate {state.rate}", flush=True)
if sys.argv[3:] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    subprocess.run([*sys.argv[3:], "0.2"], check=True)
    sys.exit(1)
"""


@pytest.mark.parametrize("in_slurm", [False, True])
def test_torchrun_with_a_given_id_continues_its_own_program(programs: Programs, tmp_path: Path, in_slurm: bool) -> None:
    program = tmp_path / "train.py"
    program.write_text(WITH_ANOTHER)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "localhost:0", "--rdzv-id", "77", "--max-restarts", "1", str(program), "x"]
    env = {**os.environ, "MUSTER_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    env.update({"SLURM_JOB_ID": "5"} if in_slurm else {})

    def lines() -> list[str]:
        ended = programs.run(*torchrun, "0.1", sys.executable, *torchrun, env=env)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return [line for line in ended.stdout.splitlines() if line.startswith("RUN")]

    before, other, after = lines()
    assert before == after
    assert other.endswith("0.2")
    if in_slurm:
        env["SLURM_RESTART_COUNT"] = "1"
        assert lines()[0] == before
    else:
        assert lines()[0] != before  # the same id in another launch
