"""A run through Slurm's queue, with commands that say what a test wants and a supervisor that is played."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import RefusedError, StartTimeoutError, UnreachableError
from jobs.files import append_line, read_lines, write_json
from jobs.hosts import HostSet
from jobs.placement import Host, place
from jobs.rundir import RunDir
from jobs.rundir import make_run as make_folder
from jobs.site import Site
from jobs.slurm_settings import SlurmSettings
from jobs.spec import CommandSettings, Job
from launch.console import Console
from launch.look.runstate import read_state
from launch.scheduler import held_signals, slurm_follow, slurm_run
from launch.scheduler.slurm_job import SlurmJob, ask_together
from launch.scheduler.slurm_output import BatchOutput
from launch.submit.plan import Context
from launch.submit.submission import Route, Submission
from launch.supervision.verdict import Ending, Stop
from support.slurm_commands import FakeSlurm

ID = "demo-20250101T000000.000Z-abc123"
SUPERVISOR = {"host": "n1", "pid": 7, "pid_start": 1}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.environment["PATH"])
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "POLL_S": 0.02,
        "ASK_S": 0.05,
        "ASK_SOON_S": 0.05,
        "VERDICT_S": 0.2,
        "HOPELESS_S": 0.3,
        "LEASE_S": 0.5,
    }.items():
        monkeypatch.setattr(slurm_follow, name, value)
    return fake


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    """A command of two nodes with two ranks each; its folder is made."""
    settings = CommandSettings(argv=["true"])
    job = Job(name="demo", kind="command", nodes=2, ranks_per_node=2, threads_per_rank=3, settings=settings)
    site = Site(slurm=SlurmSettings(partition="main"))
    run = RunDir(tmp_path / "runs" / ID)
    make_folder(run)
    placement = place(job, [Host(f"slurm-{node}", "") for node in range(2)])
    context = Context(job, site, placement, run, "/srv/job", "/opt/python", None, code="/opt/muster")
    return Submission(Route("slurm", HostSet((), "slurm", environment={"SLURM_CONF": str(run.path)})), context)


class Player:
    """Plays the cluster and the supervisor beside the code under test."""

    def __init__(self, run: RunDir, slurm: FakeSlurm) -> None:
        self.run = run
        self.slurm = slurm
        self.threads: list[threading.Thread] = []

    def play(self, scene: Callable[[], None]) -> None:
        """Play a scene in the background."""
        self.threads.append(threading.Thread(target=scene))
        self.threads[-1].start()

    def wait(self, condition: Callable[[], Any], deadline_s: float = 20.0) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, "what the test waits for did not come"
            time.sleep(0.02)

    def event(self, event: str, **fields: Any) -> None:
        append_line(self.run.events, {"time": time.time(), "event": event, **fields})

    def begin(self) -> None:
        """The job gets its nodes, and its supervisor starts the ranks; rank 0 prints."""
        self.slurm.job("12", state="RUNNING", nodes="n[1-2]", host="n1")
        self.event("submitted", nodes=2, world_size=4, transport="slurm", grace_s=0.1, **SUPERVISOR)
        self.lease()
        self.run.attempt(0).make()
        self.event("attempt", attempt=0, world_size=4, master_addr="10.0.0.1", master_port=4000)
        self.run.attempt(0).out(0).write_text("rank 0 says\nhalf a line")
        self.event("joined", attempt=0, seconds=1.5)

    def lease(self) -> None:
        write_json(self.run.lease, {"time": time.time(), "host": "n1", "pid": 7})

    def verdict(self, code: int, name: str, message: str) -> None:
        row = {"attempt": 0, "started": 100.0, "ended": 104.0, "first": None, "victims": [], "next_step": "do this"}
        append_line(self.run.attempts, {**row, "class": name, "code": code, "message": message})
        self.event("ended", attempt=0, code=code, message=message, **{"class": name})


@pytest.fixture
def player(submission: Submission, slurm: FakeSlurm) -> Iterator[Player]:
    player = Player(submission.context.run, slurm)
    yield player
    for thread in player.threads:
        thread.join()


def ended(run: RunDir) -> dict[str, Any]:
    rows = [row for row in read_lines(run.events) if row["event"] == "ended"]
    assert len(rows) == 1
    return rows[0]


# Submission ----------------------------------------------------------------------------------------------------------


def test_a_run_is_submitted_with_its_script_and_its_number_kept(submission: Submission, slurm: FakeSlurm) -> None:
    run = submission.context.run
    assert slurm_run.submit(submission).job_id == "12"
    text = run.sbatch.read_text()
    assert text == slurm_run.script(submission)
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --cpus-per-task=6\n" in text  # 2 ranks of 3 threads
    assert "#SBATCH --partition=main\n" in text
    assert text.endswith(f"exec /opt/python -I /opt/muster/launch/boot.py launch.supervise {run.path}\n")
    job = SlurmJob.read(run)
    assert job is not None
    assert (job.job_id, job.name, job.pid) == ("12", ID, os.getpid())
    assert job.environment == {"SLURM_CONF": str(run.path)}
    assert [row["event"] for row in read_lines(run.events)] == ["submitted"]


def test_neither_a_profiles_options_nor_an_enclosing_job_reach_the_new_one(
    submission: Submission, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"SBATCH_PARTITION": "debug", "SBATCH_ACCOUNT": "lab", "SLURM_JOB_ID": "7", "RANK": "3", "WAIT": "a b"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    slurm_run.submit(submission)
    environment = slurm.environments("sbatch")[0]
    assert {name: environment.get(name) for name in given} == {
        "SBATCH_PARTITION": None,
        "SBATCH_ACCOUNT": "lab",
        "SLURM_JOB_ID": None,
        "RANK": None,
        "WAIT": "a b",
    }


def test_a_refused_run_says_why_and_is_over(submission: Submission, slurm: FakeSlurm) -> None:
    with slurm.world() as world:
        world["refuses"] = "sbatch: error: invalid partition specified: main"
    with pytest.raises(RefusedError, match=r"slurm.partition: sbatch says: invalid .* there is main \(4 nodes"):
        slurm_run.submit(submission)
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


def test_a_waiting_run_says_why_it_waits(submission: Submission, slurm: FakeSlurm) -> None:
    slurm_run.submit(submission)
    slurm.job("12", reason="Resources")
    state = read_state(submission.context.run)
    assert (state.label, state.is_over) == ("starting", False)
    assert state.message == "Slurm job 12: it waits for nodes to become free (Resources)"


def test_while_a_supervisor_renews_its_lease_slurm_is_asked_nothing(
    submission: Submission, slurm: FakeSlurm, player: Player
) -> None:
    slurm_run.submit(submission)
    player.begin()
    before = len(slurm.calls())
    assert read_state(submission.context.run).label == "running"
    assert len(slurm.calls()) == before


@pytest.mark.parametrize(
    ("job", "label", "code", "message"),
    [
        ({"state": "TIMEOUT", "nodes": "n[1-2]"}, "failed", 124, "it reached its time limit"),
        ({"state": "CANCELLED"}, "stopped", 130, "it was cancelled"),
        ({"state": "RUNNING", "nodes": "n2", "host": "n1"}, "lost", None, "n1, the node of its supervisor, failed"),
        ({"state": "PENDING", "reason": "BeginTime"}, "starting", None, "Slurm job 12: queued again: its begin time"),
        ({"state": "RUNNING", "nodes": "n[1-2]", "host": "n1"}, "running?", None, "has not been heard for 30 s"),
        ({"forgotten": True}, "lost", None, "Slurm does not know job 12 (any more)"),
        ({"name": "another"}, "lost", None, "Slurm does not know job 12 (any more)"),  # numbers come again
    ],
)
def test_a_supervisor_that_is_not_heard_leaves_the_word_to_slurm(
    submission: Submission, slurm: FakeSlurm, player: Player, job: dict, label: str, code: int | None, message: str
) -> None:
    slurm_run.submit(submission)
    player.begin()
    write_json(submission.context.run.lease, {"time": time.time() - 100, "host": "n1", "pid": 7})
    slurm.job("12", **job)
    state = read_state(submission.context.run)
    assert (state.label, state.code) == (label, code)
    assert message in (state.message or "")


def test_a_run_that_is_watched_asks_slurm_no_more_than_every_few_seconds(
    submission: Submission, slurm: FakeSlurm
) -> None:
    slurm_run.submit(submission)
    for _ in range(5):
        assert read_state(submission.context.run).label == "starting"
    assert len(slurm.calls("squeue")) == 1


def test_many_waiting_runs_are_one_call_of_squeue(submission: Submission, slurm: FakeSlurm) -> None:
    runs = []
    for number in range(1, 5):
        run = RunDir(submission.context.run.path.with_name(f"demo-20250101T00000{number}.000Z-abc123"))
        make_folder(run)
        slurm_run.submit(replace(submission, context=replace(submission.context, run=run)))
        runs.append(run)
    append_line(runs[0].events, {"time": 1.0, "event": "ended", "code": 0, "class": "done"})
    ask_together(runs)
    assert [read_state(run).label for run in runs] == ["done", "starting", "starting", "starting"]
    assert [call[-1] for call in slurm.calls("squeue")] == ["--jobs=13,14,15"]


def test_a_supervisor_that_never_began_is_told_from_one_that_has_gone(submission: Submission, slurm: FakeSlurm) -> None:
    slurm_run.submit(submission)
    slurm.job("12", state="RUNNING", nodes="n[1-2]", host="n1")
    assert read_state(submission.context.run).message == "Slurm job 12 runs on n[1-2]; its supervisor begins"


def test_where_slurm_cannot_be_asked_the_rows_count(submission: Submission, slurm: FakeSlurm) -> None:
    slurm_run.submit(submission)
    with slurm.world() as world:
        world["down"] = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    state = read_state(submission.context.run)
    assert state.label == "starting?"
    assert "squeue says" in (state.message or "")


# Following -----------------------------------------------------------------------------------------------------------


def test_a_run_is_followed_from_the_queue_to_its_verdict(
    submission: Submission, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_run.submit(submission)
    slurm.job("12", reason="Priority")

    def scene() -> None:
        player.wait(lambda: len(slurm.calls("squeue")) > 2)
        player.begin()
        player.verdict(3, "failed", "rank 1 on node 0 (n1) exited with code 3")
        slurm.job("12", state="FAILED", code="3:0")

    player.play(scene)
    assert slurm_follow.follow(submission.context.run, Console()) == 3
    shown = capsys.readouterr()
    assert shown.out == "rank 0 says\nhalf a line\n"
    said = shown.err.splitlines()
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
    submission: Submission, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submission.context.run
    slurm_run.submit(submission)
    (run.path / "slurm-12.out").write_text("slurm_script: 5: exec: /opt/python: not found\n")
    slurm.job("12", state="FAILED", code="127:0", nodes="n[1-2]", host="n1", reason="NonZeroExitCode")
    assert slurm_follow.follow(run, Console()) == 127
    assert "the interpreter /opt/python is not on n1; correct interpreter" in ended(run)["message"]
    assert "  slurm_script: 5: exec: /opt/python: not found" in capsys.readouterr().err
    assert read_state(run).code == 127


def test_an_attempt_that_slurm_ended_gets_its_row(submission: Submission, slurm: FakeSlurm, player: Player) -> None:
    run = submission.context.run
    slurm_run.submit(submission)
    player.begin()
    run.lease.unlink()
    slurm.job("12", state="NODE_FAIL", nodes="n[1-2]")
    assert slurm_follow.follow(run, Console(quiet=True)) == 69
    assert ended(run)["class"] == "unreachable"
    assert [(row["attempt"], row["code"]) for row in read_lines(run.attempts)] == [(0, 69)]


def test_a_job_that_can_never_start_is_cancelled(submission: Submission, slurm: FakeSlurm) -> None:
    slurm_run.submit(submission)
    slurm.job("12", reason="PartitionNodeLimit")
    assert slurm_follow.follow(submission.context.run, Console(quiet=True)) == 78
    assert slurm.calls("scancel") == [["scancel", "12"]]
    assert (
        "was cancelled, for it would never start: the partition has fewer" in ended(submission.context.run)["message"]
    )


def test_an_orphan_is_cancelled(submission: Submission, slurm: FakeSlurm, player: Player) -> None:
    """Slurm let go of the node with the supervisor: without us the others would be held until the time limit."""
    slurm_run.submit(submission)
    player.begin()
    submission.context.run.lease.unlink()
    slurm.job("12", nodes="n2")
    assert slurm_follow.follow(submission.context.run, Console(quiet=True)) == 69
    assert slurm.calls("scancel") == [["scancel", "12"]]


def test_a_job_that_is_stopped_from_outside_and_queued_again_is_followed_on(
    submission: Submission, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_run.submit(submission)

    def scene() -> None:
        player.begin()
        player.verdict(130, "stopped", "stopped by SIGTERM")
        slurm.job("12", state="PENDING", reason="BeginTime")
        player.wait(lambda: len(slurm.calls("squeue")) > 2)
        player.event("submitted", transport="slurm", **{**SUPERVISOR, "pid": 8})
        player.event("attempt", attempt=1, world_size=4, master_addr="10.0.0.1", master_port=4001)
        player.event("ended", attempt=1, code=0, message="4 ranks ended with 0", **{"class": "done"})
        slurm.job("12", state="COMPLETED")

    player.play(scene)
    assert slurm_follow.follow(submission.context.run, Console()) == 0
    said = capsys.readouterr().err
    assert "Slurm job 12: queued again: its begin time" in said
    assert "master 10.0.0.1:4001" in said


def test_a_run_is_followed_through_restarts_and_several_requeues(
    submission: Submission, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_run.submit(submission)

    def start(number: int) -> None:
        """A start of the job drains, and has itself queued again."""
        player.event("submitted", transport="slurm", **{**SUPERVISOR, "pid": 8 + number})
        player.event("resuming", attempt=number, checkpoint=f"step-{number}", step=number)
        player.event("attempt", attempt=number, world_size=4, master_addr="10.0.0.1", master_port=4001)
        slurm.job("12", state="RUNNING", nodes="n[1-2]", host="n1")
        player.event("draining", attempt=number, by="SIGUSR2", deadline_s=60.0)
        player.event("ended", attempt=number, code=75, message="saved", **{"class": "requeue"})
        player.event("requeueing", job="12")
        before = len(slurm.calls("squeue"))
        slurm.job("12", state="COMPLETING")
        player.wait(lambda: len(slurm.calls("squeue")) > before + 2)
        slurm.job("12", state="PENDING", reason="BeginTime")
        player.wait(lambda: len(slurm.calls("squeue")) > before + 5)

    def scene() -> None:
        player.begin()
        player.event("attempt_ended", attempt=0, code=69, message="n2 is gone", **{"class": "unreachable"})
        player.event("restarting", attempt=1, delay_s=0.5, hosts=["n1"], why="n2 is gone")
        for number in (1, 2):
            start(number)
        player.event("submitted", transport="slurm", **{**SUPERVISOR, "pid": 20})
        player.event("ended", attempt=3, code=0, message="4 ranks ended with 0", **{"class": "done"})
        slurm.job("12", state="COMPLETED")

    player.play(scene)
    assert slurm_follow.follow(submission.context.run, Console()) == 0
    said = capsys.readouterr().err
    assert "muster: n2 is gone\nattempt 1 in 0.5 s on 1 node\n" in said
    assert "going on from step-1\nattempt 1: 4 ranks start" in said
    assert "saving, then stopping: SIGUSR2\nSlurm job 12: its supervisor has it queued again\n" in said
    assert said.count("Slurm job 12: queued again: its begin time") == 2


def test_ctrl_c_between_two_starts_takes_it_out_of_the_queue(
    submission: Submission, slurm: FakeSlurm, player: Player
) -> None:
    slurm_run.submit(submission)

    def scene() -> None:
        player.begin()
        player.verdict(75, "requeue", "saved")
        slurm.job("12", state="RUNNING")  # Slurm has not let go of it yet
        player.wait(lambda: len(slurm.calls("squeue")) > 2)
        os.kill(os.getpid(), signal.SIGINT)

    player.play(scene)
    assert slurm_follow.follow(submission.context.run, Console(quiet=True)) == 130
    assert slurm.calls("scancel") == [["scancel", "12"]]


def test_a_run_that_is_not_queued_again_ends_with_75(submission: Submission, slurm: FakeSlurm, player: Player) -> None:
    slurm_run.submit(submission)

    def scene() -> None:
        player.begin()
        player.verdict(75, "requeue", "saved")
        slurm.job("12", state="FAILED", code="75:0")

    player.play(scene)
    assert slurm_follow.follow(submission.context.run, Console(quiet=True)) == 75


def test_of_a_run_that_goes_on_only_what_is_new_is_shown(
    submission: Submission, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    player.begin()
    player.verdict(69, "unreachable", "n2 is gone")
    slurm_run.submit(submission)

    def scene() -> None:
        player.event("submitted", transport="slurm", **{**SUPERVISOR, "pid": 9})
        player.event("ended", attempt=1, code=0, message="done", **{"class": "done"})
        slurm.job("12", state="COMPLETED")

    player.play(scene)
    assert slurm_follow.follow(submission.context.run, Console()) == 0
    assert "all ranks joined" not in capsys.readouterr().err


def test_a_controller_that_is_away_for_a_while_is_waited_for(
    submission: Submission, slurm: FakeSlurm, player: Player, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_run.submit(submission)
    with slurm.world() as world:
        world["down"] = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"

    def scene() -> None:
        player.wait(lambda: len(slurm.calls("squeue")) > 2)
        with slurm.world() as world:
            world["down"] = ""
        slurm.job("12", state="TIMEOUT")

    player.play(scene)
    assert slurm_follow.follow(submission.context.run, Console()) == 124
    assert capsys.readouterr().err.count("still trying") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_what_waits(
    submission: Submission, slurm: FakeSlurm, player: Player, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_run.submit(submission)

    def scene() -> None:
        player.wait(lambda: slurm.calls("squeue"))
        os.kill(os.getpid(), number)

    player.play(scene)
    before = signal.getsignal(number)
    assert slurm_follow.follow(submission.context.run, Console()) == 130
    assert signal.getsignal(number) is before
    assert slurm.calls("scancel") == [["scancel", "12"]]
    by = held_signals.SIGNALS[number]
    assert ended(submission.context.run)["message"] == f"stopped by {by} while Slurm job 12 waited"
    assert f"cancelling Slurm job 12: {by}" in capsys.readouterr().err


def test_ctrl_c_between_submission_and_following_still_cancels(submission: Submission, slurm: FakeSlurm) -> None:
    with held_signals.holding_signals() as asked:
        slurm_run.submit(submission)
        os.kill(os.getpid(), signal.SIGINT)
        assert slurm_follow.follow(submission.context.run, Console(quiet=True), asked) == 130
    assert slurm.calls("scancel") == [["scancel", "12"]]


def test_ctrl_c_has_the_supervisor_stop_what_runs(submission: Submission, slurm: FakeSlurm, player: Player) -> None:
    run = submission.context.run
    slurm_run.submit(submission)

    def scene() -> None:
        player.begin()
        player.wait(lambda: signal.getsignal(signal.SIGINT) != signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        player.wait(run.stop.exists)
        assert json.loads(run.stop.read_text())["now"] is False
        player.verdict(130, "stopped", "stopped by muster stop")

    player.play(scene)
    assert slurm_follow.follow(run, Console(quiet=True)) == 130
    assert slurm.calls("scancel") == []


def test_a_second_ctrl_c_does_not_wait_for_the_supervisor(
    submission: Submission, slurm: FakeSlurm, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submission.context.run
    slurm_run.submit(submission)

    def scene() -> None:
        player.begin()
        player.wait(lambda: signal.getsignal(signal.SIGINT) != signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        player.wait(run.stop.exists)
        os.kill(os.getpid(), signal.SIGINT)

    player.play(scene)
    assert slurm_follow.follow(run, Console(quiet=True)) == 130
    assert slurm.calls("scancel") == [["scancel", "12"]]
    assert ended(run)["message"] == "stopped by Ctrl-C while Slurm job 12 ran"


def test_a_run_that_was_never_submitted_cannot_be_followed(make_run) -> None:
    with pytest.raises(UnreachableError, match=r"has no slurm.json: it was not submitted to Slurm"):
        slurm_follow.follow(make_run().submitted().run, Console())


# Stopping ------------------------------------------------------------------------------------------------------------


def test_stop_cancels_what_waits(submission: Submission, slurm: FakeSlurm, muster) -> None:
    slurm_run.submit(submission)
    code, out, _ = muster("stop")
    assert (code, out.split(" ended after ")[0]) == (0, ID)
    assert "stopped (130)" in out
    assert ended(submission.context.run)["message"] == "stopped by muster stop while Slurm job 12 waited"


def test_stop_lets_the_supervisor_end_and_then_cancels_to_be_sure(
    submission: Submission, slurm: FakeSlurm, player: Player, muster
) -> None:
    run = submission.context.run
    slurm_run.submit(submission)
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
    submission: Submission, slurm: FakeSlurm, player: Player, code: int
) -> None:
    """It has a last row, of its last start, and is not over for all that."""
    run = submission.context.run
    slurm_run.submit(submission)
    player.begin()
    player.verdict(code, "of the last start", "the time limit is near")
    slurm.job("12", state="PENDING", reason="BeginTime")
    slurm_follow.cancel(run, grace_s=0.1, now=False)
    assert slurm.calls("scancel")[0] == ["scancel", "12"]
    last = [row for row in read_lines(run.events) if row["event"] == "ended"][-1]
    assert (last["code"], last["message"]) == (130, "stopped by muster stop while Slurm job 12 waited")


def test_stop_leaves_a_run_alone_that_is_over_for_slurm_too(
    submission: Submission, slurm: FakeSlurm, player: Player
) -> None:
    run = submission.context.run
    slurm_run.submit(submission)
    player.begin()
    player.verdict(75, "requeue", "the time limit is near")
    slurm.job("12", state="FAILED", code="75:0")
    slurm_follow.cancel(run, grace_s=0.1, now=False)
    assert slurm.calls("scancel") == []
    assert ended(run)["code"] == 75


def test_stop_cancels_a_job_whose_supervisor_does_not_answer(
    submission: Submission, slurm: FakeSlurm, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_follow, "BEYOND_GRACE_S", 0.2)
    run = submission.context.run
    slurm_run.submit(submission)
    player.begin()
    slurm_follow.cancel(run, grace_s=0.1, now=False)
    assert ended(run)["message"] == "stopped by muster stop while Slurm job 12 ran"


def test_stop_does_not_wait_for_ever(submission: Submission, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_follow, "BEYOND_GRACE_S", 0.1)
    monkeypatch.setattr(slurm_follow, "KILL_WAIT_S", 0.3)
    slurm_run.submit(submission)
    slurm.job("12", state="COMPLETING")
    with pytest.raises(StartTimeoutError, match=r"has not ended within 0.4 s; see Slurm job 12"):
        slurm_follow.cancel(submission.context.run, grace_s=0.0, now=True)


def test_stop_says_that_the_controller_is_away(submission: Submission, slurm: FakeSlurm) -> None:
    slurm_run.submit(submission)
    with slurm.world() as world:
        world["down"] = "scancel: error: Unable to contact slurm controller (connect failure)"
    with pytest.raises(UnreachableError, match="scancel says"):
        slurm_follow.cancel(submission.context.run, grace_s=0.0, now=False)


# The supervisor's side ------------------------------------------------------------------------------------------------


def ending(**fields: Any) -> Ending:
    row = {"rank": 0, "node": 1, "host": "n1", "code": None, "signal": None, "ended": 1.0, "cause": "own"}
    return Ending(**{**row, **fields})


def test_agents_that_went_all_at_once_went_because_slurm_says_so(submission: Submission) -> None:
    run = submission.context.run
    path = run.path / "slurm-12.out"
    path.write_text("error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:27:30 DUE TO JOB REQUEUE ***\n")
    output = BatchOutput(run, "12")
    gone = ending(rank=None, code=69, message="its agent has gone")
    assert output.cause(gone) is None  # what stands there is of the try before
    for failure in (gone, ending(signal="SIGTERM"), ending(signal="SIGKILL")):
        with path.open("a") as file:
            file.write("error: *** JOB 12 ON n1 CANCELLED AT 2026-11-21T10:28:38 ***\nstopping the ranks\n")
        assert output.cause(failure) == Stop(130, "stopped by scancel", final=True)
    assert output.cause(ending(code=3)) is None  # a rank that failed by itself before
    assert output.cause(None) is None


def test_who_ran_out_of_memory_is_named_and_only_in_the_attempt_that_did(submission: Submission) -> None:
    run = submission.context.run
    output = BatchOutput(run, "12")
    (run.path / "slurm-12.out").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.\n")
    text = "Slurm killed it, for it ran out of memory; raise slurm.mem, or put fewer ranks on a node"
    assert output.cause(ending(signal="SIGKILL")) == Stop(1, f"rank 0 on node 1 (n1): {text}")
    assert output.cause(ending(signal="SIGKILL")) is None  # the next attempt: somebody else's kill -9
    with (run.path / "slurm-12.out").open("a") as file:
        file.write("srun: error: n2: task 1: Out Of Memory\n")
    assert output.cause(ending(rank=None)) == Stop(1, f"n2: {text}")  # the one that was seen first went with it
    assert output.complaint() is not None


def test_without_an_output_nothing_is_known(submission: Submission) -> None:
    assert BatchOutput(submission.context.run, "12").cause(ending(signal="SIGTERM")) is None
