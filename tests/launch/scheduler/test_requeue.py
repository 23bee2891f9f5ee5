"""A drained run in its Slurm job: queued again, or said why not; with commands that do what the test says."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import append_line, read_lines
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir, make_run
from muster.jobs.spec.job import CheckpointSettings, Job
from muster.jobs.spec.site import Site
from muster.jobs.spec.slurm import SlurmSettings
from muster.jobs.spec.train import TrainSettings
from muster.launch import supervise
from muster.launch.plan.plan import Context
from muster.launch.plan.submission import Route, Submission
from muster.launch.records.verdict import Verdict
from muster.launch.scheduler.requeue import OwnJob, own_job
from muster.launch.scheduler.slurm_run import settings_of
from support.slurm_commands import FakeSlurm

IN_JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
CANCELLED = "slurmstepd-n1: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:28:38{} ***\n"


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin")
    fake.job("12", state="RUNNING", name="demo")
    return fake


@pytest.fixture(autouse=True)
def kept_handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    """A training of two nodes that saves, in its Slurm job."""
    settings = TrainSettings.model_validate({"model": "vgg11", "data": "digits"})
    job = Job(name="demo", kind="train", nodes=2, checkpoint=CheckpointSettings(), settings=settings)
    run = RunDir(tmp_path / "demo-20250101T000000.000Z-abc123")
    make_run(run)
    run.sbatch.touch()
    placement = place(job, [Host("n1", ""), Host("n2", "")])
    return Submission(Route("slurm", HostSet((), "slurm")), Context(job, Site(), placement, run, "/", "/py", None))


def inside(submission: Submission, slurm: FakeSlurm, restarts: int = 0, **more: str) -> OwnJob:
    environ = {**slurm.environment, **IN_JOB, "SLURM_RESTART_COUNT": str(restarts), **more}
    own = own_job(submission, environ)
    assert own is not None
    return own


@pytest.fixture
def own(submission: Submission, slurm: FakeSlurm) -> OwnJob:
    """The supervisor's view of its job, in the first start."""
    return inside(submission, slurm)


def with_slurm(submission: Submission, settings: SlurmSettings) -> Submission:
    job = submission.context.job.model_copy(update={"slurm": settings})
    return replace(submission, context=replace(submission.context, job=job))


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(run.events) if row["event"] == name]


def test_a_drained_run_is_queued_again(own: OwnJob, slurm: FakeSlurm) -> None:
    assert own.begin() is None
    assert [own.end(code) for code in (0, 1, 124, 130)] == [0, 1, 124, 130]
    assert slurm.calls("scontrol") == []
    assert own.end(75) == 75
    assert slurm.calls("scontrol") == [["scontrol", "requeue", "12"]]
    assert [row["job"] for row in events(own.run, "requeueing")] == ["12"]


def test_an_element_of_an_array_is_queued_again_by_both_numbers(submission: Submission, slurm: FakeSlurm) -> None:
    slurm.job("10_3", state="RUNNING", name="demo")
    own = inside(submission, slurm, SLURM_ARRAY_JOB_ID="10", SLURM_ARRAY_TASK_ID="3")
    assert own.end(75) == 75
    assert slurm.calls("scontrol") == [["scontrol", "requeue", "10_3"]]


def test_where_scontrol_refuses_the_user_hears_what_else_helps(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.says(requeue_says="slurm_update error: Access/permission denied")
    assert inside(submission, slurm).end(75) == 75
    said = capsys.readouterr().err
    assert "scontrol requeue 12: slurm_update error: Access/permission denied" in said
    assert f"RequeueExit=75; otherwise continue with: muster resume {submission.context.run.run_id}" in said
    assert len(events(submission.context.run, "warning")) == 1


def test_where_scontrol_is_missing_the_user_hears_it(
    submission: Submission, slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    own = own_job(submission, {**IN_JOB, "PATH": str(tmp_path / "empty")})
    assert own.end(75) == 75
    assert "scontrol requeue 12: slurm: scontrol is not on PATH here" in capsys.readouterr().err


def test_a_run_that_may_not_be_queued_again_is_not(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    own = inside(with_slurm(submission, SlurmSettings(requeue=False)), slurm)
    assert own.end(75) == 75
    assert slurm.calls("scontrol") == []
    assert "slurm.requeue: false" in capsys.readouterr().err


def test_a_run_that_somebody_cancels_is_left_cancelled(own: OwnJob, slurm: FakeSlurm) -> None:
    """scancel's SIGTERM drains it too; scontrol would then bring it back to life."""
    slurm.job("12", state="COMPLETING")
    own.output.path.write_text(CANCELLED.format(""))
    assert own.end(75) == 130
    assert slurm.calls("scontrol") == []
    assert [(row["code"], row["message"]) for row in events(own.run, "ended")] == [
        (130, "stopped by scancel, after a save")
    ]


@pytest.mark.parametrize("why", [" DUE TO JOB REQUEUE", " DUE TO PREEMPTION"])
def test_what_slurm_itself_queues_again_is_left_to_it(own: OwnJob, slurm: FakeSlurm, why: str) -> None:
    slurm.job("12", state="COMPLETING")
    own.output.path.write_text(CANCELLED.format(why))
    assert own.end(75) == 75
    assert slurm.calls("scontrol") == []


def test_a_run_that_muster_stop_ends_meanwhile_is_not_queued_again(own: OwnJob, slurm: FakeSlurm) -> None:
    own.run.stop.write_text("{}")
    assert own.end(75) == 130
    assert slurm.calls("scontrol") == []


# Starts that bring nothing -------------------------------------------------------------------------------------------


def test_the_third_start_in_a_row_without_a_new_checkpoint_is_the_last(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    for restarts in range(3):
        own = inside(submission, slurm, restarts)
        assert own.begin() is None
        code = own.end(75)
    assert code == 93
    assert len(slurm.calls("scontrol")) == 2
    ended = events(own.run, "ended")[-1]
    assert (ended["code"], ended["class"]) == (93, "do-not-restart")
    assert "3 starts of job 12 in a row have made no new checkpoint" in ended["message"]
    assert f"muster resume {own.run.run_id}" in capsys.readouterr().err


def test_a_run_that_goes_on_is_queued_again_for_ever(submission: Submission, slurm: FakeSlurm) -> None:
    for restarts in range(6):
        own = inside(submission, slurm, restarts)
        assert own.begin() is None
        append_line(own.run.events, {"event": "resuming", "attempt": restarts, "step": 5 * restarts})
        append_line(own.run.events, {"event": "saved", "attempt": restarts, "step": 5 * restarts + 5})
        assert own.end(75) == 75
    assert len(slurm.calls("scontrol")) == 6


def test_slurms_own_requeues_are_bounded_too(submission: Submission, slurm: FakeSlurm) -> None:
    """After a failed node there is no verdict: the next start finds out."""
    for restarts in range(3):
        assert inside(submission, slurm, restarts).begin() is None
    hopeless = inside(submission, slurm, 3).begin()
    assert hopeless.code == 93


def test_starts_that_only_slurm_has_counted_are_said_and_count(
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    hopeless = inside(submission, slurm, 50).begin()
    assert "50 starts of job 12 in a row" in hopeless.message
    assert (
        "Slurm has started job 12 50 times before (SLURM_RESTART_COUNT), but the run folder has a record of 0"
        in capsys.readouterr().err
    )


def test_a_job_without_checkpoints_begins_anew_as_often_as_slurm_likes(
    submission: Submission, slurm: FakeSlurm
) -> None:
    job = submission.context.job.model_copy(update={"checkpoint": None})
    plain = replace(submission, context=replace(submission.context, job=job))
    for restarts in range(6):
        assert inside(plain, slurm, restarts).begin() is None


def test_a_program_counts_its_starts_only_once_it_has_opened_a_session(
    submission: Submission, slurm: FakeSlurm
) -> None:
    job = submission.context.job.model_copy(update={"kind": "command"})
    program = replace(submission, context=replace(submission.context, job=job))
    for restarts in range(4):
        assert inside(program, slurm, restarts).begin() is None
    append_line(submission.context.run.events, {"event": "session", "attempt": 3})
    hopeless = inside(program, slurm, 4).begin()
    assert hopeless.code == 93


# Whose job it is -----------------------------------------------------------------------------------------------------


def test_somebodys_own_allocation_is_not_the_runs_to_queue_again(submission: Submission, slurm: FakeSlurm) -> None:
    submission.context.run.sbatch.unlink()
    assert own_job(submission, {**slurm.environment, **IN_JOB}) is None
    ssh = replace(submission, route=replace(submission.route, transport="ssh"))
    submission.context.run.sbatch.touch()
    assert own_job(ssh, {**slurm.environment, **IN_JOB}) is None


def test_submitit_queues_its_job_again_itself(submission: Submission, slurm: FakeSlurm) -> None:
    submission.context.run.slurm.touch()
    through = replace(submission, route=replace(submission.route, transport="submitit"))
    for restarts in range(3):
        own = own_job(through, {**slurm.environment, **IN_JOB, "SLURM_RESTART_COUNT": str(restarts)})
        assert own.begin() is None
        code = own.end(75)
    assert code == 93
    assert slurm.calls("scontrol") == []


def test_the_supervisors_exit_code_is_that_of_the_job(
    submission: Submission, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submission.context.run
    submission.write()
    for name, value in {**IN_JOB, "PATH": slurm.environment["PATH"], "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(supervise, "supervise", lambda *_: Verdict(75, "saved"))
    monkeypatch.setattr("sys.argv", ["supervise", str(run.path)])
    assert supervise.main() == 75
    assert slurm.calls("scontrol") == [["scontrol", "requeue", "12"]]


@pytest.mark.parametrize(
    ("given", "signal_s"),
    [
        ({}, 90),
        ({"time": 2}, 30),
        ({"time": 1}, 1),
        ({"signal_s": 20}, 20),
        ({"time": 2, "signal_s": 20}, 20),
        ({"time": "01:00:00"}, 90),
    ],
)
def test_who_saves_is_told_of_the_limit_in_time(submission: Submission, given: dict[str, Any], signal_s: int) -> None:
    assert settings_of(with_slurm(submission, SlurmSettings(**given)).context).signal_s == signal_s
