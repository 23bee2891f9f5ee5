"""A run in Slurm's queue is followed to its verdict, through restarts, requeues and deaths without one."""

import os
import signal

import pytest

from muster.jobs.basics.errors import UnreachableError
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.plan.submission import Submission
from muster.launch.records.runstate import read_state
from muster.launch.scheduler import queueing, slurm_follow
from muster.launch.supervision.console import Console
from support.slurm_commands import FakeSlurm
from support.slurm_player import Player, ended

pytestmark = pytest.mark.slow


def test_a_run_is_followed_from_the_queue_to_its_verdict(
    run: RunDir, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.job("12", reason="Priority")

    def scene() -> None:
        player.wait(lambda: len(slurm.calls("squeue")) > 2)
        player.begin()
        player.verdict(3, "failed", "rank 1 on node 0 (n1) exited with code 3")
        slurm.job("12", state="FAILED", code="3:0")

    player.play(scene)
    assert slurm_follow.follow(run, Console()) == 3
    shown = capsys.readouterr()
    assert shown.out == "rank 0 says\nhalf a line\n"
    # Slurm may have begun the job when its supervisor has written nothing yet: that is said, if it is seen.
    said = [line for line in shown.err.splitlines() if line != "Slurm job 12 runs on n[1-2]"]
    assert said[:5] == [
        "Slurm job 12: jobs of higher priority come first (Priority)",
        "Slurm job 12: its supervisor is on n1",
        "4 ranks start, master 10.0.0.1:4000",
        "all ranks joined after 1.5 s",
        "muster: rank 1 on node 0 (n1) exited with code 3",
    ]
    assert said[5].startswith("  failed, exit code 3 after ")
    assert said[6:] == ["  do this"]


def test_a_job_that_dies_without_a_verdict_is_given_one(
    run: RunDir, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "slurm-12.out").write_text("slurm_script: 5: exec: /opt/python: not found\n")
    slurm.job("12", state="FAILED", code="127:0", nodes="n[1-2]", host="n1", reason="NonZeroExitCode")
    assert slurm_follow.follow(run, Console()) == 127
    assert "the interpreter /opt/python is not on n1; correct `interpreter`" in ended(run)["message"]
    assert "  slurm_script: 5: exec: /opt/python: not found" in capsys.readouterr().err
    assert read_state(run).code == 127


def test_an_attempt_that_slurm_ended_gets_its_row(run: RunDir, slurm: FakeSlurm, player: Player) -> None:
    player.begin()
    run.lease.unlink()
    slurm.job("12", state="NODE_FAIL", nodes="n[1-2]")
    assert slurm_follow.follow(run, Console(quiet=True)) == 69
    assert ended(run)["class"] == "unreachable"
    assert [(row["attempt"], row["code"]) for row in read_lines(run.attempts)] == [(0, 69)]


def test_a_job_that_can_never_start_is_cancelled(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.job("12", reason="PartitionNodeLimit")
    assert slurm_follow.follow(run, Console(quiet=True)) == 78
    assert slurm.calls("scancel") == [["scancel", "12"]]
    assert "was cancelled, because it would never start: the job requests more nodes than" in ended(run)["message"]


def test_an_orphan_is_cancelled(run: RunDir, slurm: FakeSlurm, player: Player) -> None:
    """Slurm let go of the node with the supervisor: without us the others would be held until the time limit."""
    player.begin()
    run.lease.unlink()
    slurm.job("12", nodes="n2")
    assert slurm_follow.follow(run, Console(quiet=True)) == 69
    assert slurm.calls("scancel") == [["scancel", "12"]]


def test_a_job_that_is_stopped_from_outside_and_queued_again_is_followed_on(
    run: RunDir, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    def scene() -> None:
        player.begin()
        player.verdict(130, "stopped", "stopped by SIGTERM")
        slurm.job("12", state="PENDING", reason="BeginTime")
        player.wait_for_questions()
        player.start_again(8)
        player.event("attempt", attempt=1, world_size=4, master_addr="10.0.0.1", master_port=4001)
        player.done(1)

    player.play(scene)
    assert slurm_follow.follow(run, Console()) == 0
    said = capsys.readouterr().err
    assert "Slurm job 12: queued again: its earliest start" in said
    assert "master 10.0.0.1:4001" in said


def test_a_run_is_followed_through_restarts_and_several_requeues(
    run: RunDir, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(number: int) -> None:
        """A start of the job drains, and has itself queued again."""
        player.start_again(8 + number)
        player.event("resuming", attempt=number, checkpoint=f"step-{number}", step=number)
        player.event("attempt", attempt=number, world_size=4, master_addr="10.0.0.1", master_port=4001)
        player.event("draining", attempt=number, by="SIGUSR2", deadline_s=60.0)
        player.event("ended", attempt=number, code=75, message="saved", **{"class": "requeue"})
        player.event("requeueing", job="12")
        slurm.job("12", state="COMPLETING")
        player.wait_for_questions()
        slurm.job("12", state="PENDING", reason="BeginTime")
        player.wait_for_questions()

    def scene() -> None:
        player.begin()
        player.event("attempt_ended", attempt=0, code=69, message="n2 is gone", **{"class": "unreachable"})
        player.event("restarting", attempt=1, delay_s=0.5, hosts=["n1"], why="n2 is gone")
        for number in (1, 2):
            start(number)
        player.start_again(20)
        player.done(3)

    player.play(scene)
    assert slurm_follow.follow(run, Console()) == 0
    said = capsys.readouterr().err
    assert "muster: n2 is gone\nattempt 1 in 0.5 s on 1 node\n" in said
    assert "continuing from step-1\nattempt 1: 4 ranks start" in said
    assert "saving, then stopping: SIGUSR2\nSlurm job 12: its supervisor requeues it\n" in said
    assert said.count("Slurm job 12: queued again: its earliest start") == 2


def test_ctrl_c_between_two_starts_takes_it_out_of_the_queue(run: RunDir, slurm: FakeSlurm, player: Player) -> None:
    def scene() -> None:
        player.begin()
        player.verdict(75, "requeue", "saved")
        slurm.job("12", state="RUNNING")  # Slurm has not let go of it yet
        player.wait(lambda: len(slurm.calls("squeue")) > 2)
        os.kill(os.getpid(), signal.SIGINT)

    player.play(scene)
    assert slurm_follow.follow(run, Console(quiet=True)) == 130
    assert slurm.calls("scancel") == [["scancel", "12"]]


def test_a_run_that_is_not_queued_again_ends_with_75(run: RunDir, slurm: FakeSlurm, player: Player) -> None:
    def scene() -> None:
        player.begin()
        player.verdict(75, "requeue", "saved")
        slurm.job("12", state="FAILED", code="75:0")

    player.play(scene)
    assert slurm_follow.follow(run, Console(quiet=True)) == 75


def test_of_a_run_that_goes_on_only_what_is_new_is_shown(
    submission: Submission, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    player.begin()
    player.verdict(69, "unreachable", "n2 is gone")
    queueing.submit([submission])

    def scene() -> None:
        player.start_again(9)
        player.done(1)

    player.play(scene)
    assert slurm_follow.follow(submission.context.run, Console()) == 0
    assert "all ranks joined" not in capsys.readouterr().err


def test_a_controller_that_is_away_for_a_while_is_waited_for(
    run: RunDir, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.says(down="slurm_load_jobs error: Unable to contact slurm controller (connect failure)")

    def scene() -> None:
        player.wait(lambda: len(slurm.calls("squeue")) > 2)
        slurm.says(down="")
        slurm.job("12", state="TIMEOUT")

    player.play(scene)
    assert slurm_follow.follow(run, Console()) == 124
    assert capsys.readouterr().err.count("still trying") == 1


def test_a_run_that_was_never_submitted_cannot_be_followed(make_run) -> None:
    with pytest.raises(UnreachableError, match=r"has no slurm.json: it was not submitted to Slurm"):
        slurm_follow.follow(make_run().submitted().run, Console())
