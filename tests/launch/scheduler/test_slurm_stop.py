"""A run in Slurm's queue is ended: by a signal to who follows it, or by muster stop."""

import json
import os
import signal

import pytest

from muster.jobs.basics.errors import StartTimeoutError, UnreachableError
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.plan.submission import Submission
from muster.launch.scheduler import held_signals, queueing, slurm_follow
from muster.launch.supervision.console import Console
from support.slurm_commands import FakeSlurm
from support.slurm_player import ID, Player, ended

pytestmark = pytest.mark.slow

# By a signal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_what_waits(
    run: RunDir, slurm: FakeSlurm, player: Player, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    def scene() -> None:
        player.wait(lambda: slurm.calls("squeue"))
        os.kill(os.getpid(), number)

    player.play(scene)
    before = signal.getsignal(number)
    assert slurm_follow.follow(run, Console()) == 130
    assert signal.getsignal(number) is before
    assert slurm.calls("scancel") == [["scancel", "12"]]
    by = held_signals.SIGNALS[number]
    assert ended(run)["message"] == f"stopped by {by} while Slurm job 12 waited"
    assert f"cancelling Slurm job 12: {by}" in capsys.readouterr().err


def test_ctrl_c_between_submission_and_following_still_cancels(submission: Submission, slurm: FakeSlurm) -> None:
    with held_signals.holding_signals() as asked:
        queueing.submit([submission])
        os.kill(os.getpid(), signal.SIGINT)
        assert slurm_follow.follow(submission.context.run, Console(quiet=True), asked) == 130
    assert slurm.calls("scancel") == [["scancel", "12"]]


def test_ctrl_c_has_the_supervisor_stop_what_runs(run: RunDir, slurm: FakeSlurm, player: Player) -> None:
    def scene() -> None:
        player.interrupt()
        assert json.loads(run.stop.read_text())["now"] is False
        player.verdict(130, "stopped", "stopped by muster stop")

    player.play(scene)
    assert slurm_follow.follow(run, Console(quiet=True)) == 130
    assert slurm.calls("scancel") == []


def test_a_second_ctrl_c_does_not_wait_for_the_supervisor(run: RunDir, slurm: FakeSlurm, player: Player) -> None:
    def scene() -> None:
        player.interrupt()
        os.kill(os.getpid(), signal.SIGINT)

    player.play(scene)
    assert slurm_follow.follow(run, Console(quiet=True)) == 130
    assert slurm.calls("scancel") == [["scancel", "12"]]
    assert ended(run)["message"] == "stopped by Ctrl-C while Slurm job 12 ran"


# By muster stop ------------------------------------------------------------------------------------------------------


def test_stop_cancels_what_waits(run: RunDir, muster) -> None:
    code, out, _ = muster("stop")
    assert (code, out.split(" ended after ")[0]) == (0, ID)
    assert "stopped (130)" in out
    assert ended(run)["message"] == "stopped by muster stop while Slurm job 12 waited"


def test_stop_lets_the_supervisor_end_and_then_cancels_to_be_sure(
    run: RunDir, slurm: FakeSlurm, player: Player, muster
) -> None:
    player.begin()

    def scene() -> None:
        player.wait(run.stop.exists)
        player.verdict(130, "stopped", "stopped by muster stop")

    player.play(scene)
    assert muster("stop")[0] == 0
    assert slurm.calls("scancel") == [["scancel", "12"]]
    assert ended(run)["message"] == "stopped by muster stop"


@pytest.mark.parametrize("code", [75, 130, 69])
def test_stop_takes_a_run_out_of_the_queue_that_was_queued_again(
    run: RunDir, slurm: FakeSlurm, player: Player, code: int
) -> None:
    """It has a last row, of its last start, and is not over for all that."""
    player.begin()
    player.verdict(code, "of the last start", "the time limit is near")
    slurm.job("12", state="PENDING", reason="BeginTime")
    slurm_follow.cancel([run], grace_s=0.1, now=False)
    assert slurm.calls("scancel")[0] == ["scancel", "12"]
    last = [row for row in read_lines(run.events) if row["event"] == "ended"][-1]
    assert (last["code"], last["message"]) == (130, "stopped by muster stop while Slurm job 12 waited")


def test_stop_leaves_a_run_alone_that_is_over_for_slurm_too(run: RunDir, slurm: FakeSlurm, player: Player) -> None:
    player.begin()
    player.verdict(75, "requeue", "the time limit is near")
    slurm.job("12", state="FAILED", code="75:0")
    slurm_follow.cancel([run], grace_s=0.1, now=False)
    assert slurm.calls("scancel") == []
    assert ended(run)["code"] == 75


def test_stop_cancels_a_job_whose_supervisor_does_not_answer(
    run: RunDir, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_follow, "BEYOND_GRACE_S", 0.2)
    player.begin()
    slurm_follow.cancel([run], grace_s=0.1, now=False)
    assert ended(run)["message"] == "stopped by muster stop while Slurm job 12 ran"


def test_stop_does_not_wait_for_ever(run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_follow, "BEYOND_GRACE_S", 0.1)
    monkeypatch.setattr(slurm_follow, "KILL_WAIT_S", 0.3)
    slurm.job("12", state="COMPLETING")
    with pytest.raises(StartTimeoutError, match=r"has not ended within 0.4 s; see Slurm job 12"):
        slurm_follow.cancel([run], grace_s=0.0, now=True)


def test_stop_says_that_the_controller_is_away(run: RunDir, slurm: FakeSlurm) -> None:
    slurm.says(down="scancel: error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(UnreachableError, match="scancel says"):
        slurm_follow.cancel([run], grace_s=0.0, now=False)
