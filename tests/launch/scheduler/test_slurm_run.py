"""A run is submitted to Slurm's queue, and what status sees of it there."""

import os
import time
from dataclasses import replace

import pytest

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import append_line, read_lines, write_json
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.runfolder.rundir import make_run as make_folder
from muster.launch.plan.submission import Submission
from muster.launch.records.runstate import read_state
from muster.launch.records.slurm_job import SlurmJob, ask_together
from muster.launch.scheduler import queueing, slurm_run
from support.slurm_commands import FakeSlurm
from support.slurm_player import ID, Player, ended

pytestmark = pytest.mark.slow

# Submission ----------------------------------------------------------------------------------------------------------


def test_a_run_is_submitted_with_its_script_and_its_number_kept(submission: Submission, slurm: FakeSlurm) -> None:
    run = submission.context.run
    assert queueing.submit([submission]).job_id == "12"
    text = run.sbatch.read_text()
    assert text == queueing.script(submission)
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --cpus-per-task=6\n" in text  # 2 ranks of 3 threads
    assert "#SBATCH --partition=main\n" in text
    assert text.endswith(f"exec /opt/python -I /opt/muster/muster/launch/boot.py muster.launch.supervise {run.path}\n")
    job = SlurmJob.read(run)
    assert (job.job_id, job.name, job.pid) == ("12", ID, os.getpid())
    assert job.environment == {"SLURM_CONF": str(run.path)}
    assert [row["event"] for row in read_lines(run.events)] == ["submitted"]


def test_neither_a_profiles_options_nor_an_enclosing_job_reach_the_new_one(
    submission: Submission, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"SBATCH_PARTITION": "debug", "SBATCH_ACCOUNT": "lab", "SLURM_JOB_ID": "7", "RANK": "3", "WAIT": "a b"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    queueing.submit([submission])
    environment = slurm.environments("sbatch")[0]
    assert {name: environment.get(name) for name in given} == {
        "SBATCH_PARTITION": None,
        "SBATCH_ACCOUNT": "lab",
        "SLURM_JOB_ID": None,
        "RANK": None,
        "WAIT": "a b",
    }


def test_a_refused_run_says_why_and_is_over(submission: Submission, slurm: FakeSlurm) -> None:
    slurm.says(refuses="sbatch: error: invalid partition specified: main")
    with pytest.raises(RefusedError, match=r"slurm.partition: sbatch says: invalid .* available: main \(4 nodes"):
        queueing.submit([submission])
    run = submission.context.run
    assert not run.slurm.exists()
    assert (ended(run)["code"], ended(run)["class"]) == (78, "refused")
    assert read_state(run).state == "failed"


def test_what_one_task_asks_for_is_what_its_ranks_need(submission: Submission) -> None:
    job = submission.context.job
    assert slurm_run.cores_of(job) == 6
    assert slurm_run.cores_of(job.model_copy(update={"threads_per_rank": "auto"})) == 2
    assert slurm_run.cores_of(job.model_copy(update={"ranks_per_node": "slots"})) is None


# What status sees ----------------------------------------------------------------------------------------------------


def test_a_waiting_run_says_why_it_waits(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.job("12", reason="Resources")
    state = read_state(run)
    assert (state.label, state.is_over) == ("starting", False)
    assert state.message == "Slurm job 12: it waits for nodes to become free (Resources)"


def test_while_a_supervisor_renews_its_lease_slurm_is_asked_nothing(
    run: RunDir, slurm: FakeSlurm, player: Player
) -> None:
    player.begin()
    before = len(slurm.calls())
    assert read_state(run).label == "running"
    assert len(slurm.calls()) == before


@pytest.mark.parametrize(
    ("job", "label", "code", "message"),
    [
        ({"state": "TIMEOUT", "nodes": "n[1-2]"}, "failed", 124, "it reached its time limit"),
        ({"state": "CANCELLED"}, "stopped", 130, "it was cancelled"),
        ({"state": "RUNNING", "nodes": "n2", "host": "n1"}, "lost", None, "n1, the node of its supervisor, failed"),
        ({"state": "PENDING", "reason": "BeginTime"}, "starting", None, "Slurm job 12: queued again: its earliest"),
        ({"state": "RUNNING", "nodes": "n[1-2]", "host": "n1"}, "running?", None, "has been silent for 30 s"),
        ({"forgotten": True}, "lost", None, "Slurm does not know job 12 (any more)"),
        ({"name": "another"}, "lost", None, "Slurm does not know job 12 (any more)"),  # numbers come again
    ],
)
def test_a_supervisor_that_is_not_heard_leaves_the_word_to_slurm(
    run: RunDir, slurm: FakeSlurm, player: Player, job: dict, label: str, code: int | None, message: str
) -> None:
    player.begin()
    write_json(run.lease, {"time": time.time() - 100, "host": "n1", "pid": 7})
    slurm.job("12", **job)
    state = read_state(run)
    assert (state.label, state.code) == (label, code)
    assert message in (state.message or "")


def test_a_run_that_is_watched_asks_slurm_no_more_than_every_few_seconds(run: RunDir, slurm: FakeSlurm) -> None:
    for _ in range(5):
        assert read_state(run).label == "starting"
    assert len(slurm.calls("squeue")) == 1


def test_many_waiting_runs_are_one_call_of_squeue(submission: Submission, slurm: FakeSlurm) -> None:
    runs = []
    for number in range(1, 5):
        run = RunDir(submission.context.run.path.with_name(f"demo-20250101T00000{number}.000Z-abc123"))
        make_folder(run)
        queueing.submit([replace(submission, context=replace(submission.context, run=run))])
        runs.append(run)
    append_line(runs[0].events, {"time": 1.0, "event": "ended", "code": 0, "class": "done"})
    ask_together(runs)
    assert [read_state(run).label for run in runs] == ["done", "starting", "starting", "starting"]
    assert [call[-1] for call in slurm.calls("squeue")] == ["--jobs=13,14,15"]


def test_a_supervisor_that_never_began_is_told_from_one_that_has_gone(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.job("12", state="RUNNING", nodes="n[1-2]", host="n1")
    assert read_state(run).message == "Slurm job 12 runs on n[1-2]; its supervisor is starting"


def test_where_slurm_cannot_be_asked_the_rows_count(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.says(down="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    state = read_state(run)
    assert state.label == "starting?"
    assert "squeue says" in (state.message or "")
