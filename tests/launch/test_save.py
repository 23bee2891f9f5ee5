"""`muster save` and SIGUSR1 against real runs, and what cannot be saved."""

import json
import os
import signal
from pathlib import Path

import pytest

from muster.launch import cli
from support.live import SLEEP, TRAINING, LiveRun, two_by_two, wait_until

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]
pytestmark += [pytest.mark.usefixtures("forked_supervisors")]

SAVING = TRAINING + "checkpoint: {every_steps: 100000}\n"


def call(capsys: pytest.CaptureFixture[str], live: LiveRun, *words: str) -> tuple[int, str, str]:
    code = cli.main(["save", "--runs", str(live.root), *words])
    out, err = capsys.readouterr()
    return code, out, err


def agent(live: LiveRun, node: int) -> int:
    return int(json.loads(live.run.attempt(0).node(node).read_text())["pid"])


def test_a_running_training_saves_when_it_is_asked_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = LiveRun(tmp_path, SAVING)
    live.wait_for("submitted")
    code, out, _ = call(capsys, live)  # before there is a step to save
    saved = live.events("saved")[-1]
    assert (code, out) == (0, f"{live.run.run_id}: saved after step {saved['step']}\n")
    for who in (agent(live, 1), live.process.pid):
        before = len(live.events("saved"))
        os.kill(who, signal.SIGUSR1)
        live.wait_for("saved", before + 1)
    steps = [row["step"] for row in live.events("saved")]
    assert steps == sorted(set(steps))
    assert not live.run.save.exists()
    live.interrupt()
    assert live.end() == 130
    code, _, err = call(capsys, live)
    run_id = live.run.run_id
    assert (code, err) == (
        78,
        f"muster: {run_id}: is not running (stopped); {live.run.command('checkpoint list')} lists its checkpoints\n",
    )


NO_SESSION = (
    "its program has opened no session (muster.session()), so Muster cannot save it; wait until it opens one, or let "
    "it save its own checkpoints"
)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (TRAINING, "its job has no checkpoint: section, so it saves nothing; add one and start a new run"),
        (two_by_two(SLEEP), NO_SESSION),
    ],
)
def test_a_run_that_saves_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str, words: str
) -> None:
    live = LiveRun(tmp_path, job)
    live.wait_for("started", 2)
    assert call(capsys, live) == (78, "", f"muster: {live.run.run_id}: {words}\n")
    live.interrupt()
    assert live.end() == 130


def test_a_run_that_does_not_come_to_a_log_point_is_named_after_the_time_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = LiveRun(tmp_path, SAVING)
    live.wait_for("submitted")
    code, _, err = call(capsys, live, "--timeout", "0.001")
    assert code == 124
    assert "has not saved within 0.001 s; it saves at its next log point (train.log_every)" in err
    assert call(capsys, live, "--timeout", "0")[0] == 2
    live.interrupt()
    live.end()


def test_a_program_has_sigusr1_for_itself(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    live.wait_for_output("ready", 1)
    os.kill(live.pid_of(1), signal.SIGUSR1)
    assert live.end() == 128 + signal.SIGUSR1


TOLD = """
import json, os, signal, sys, time
def stop(*_):
    told = json.load(open(os.environ["MUSTER_STOP_FILE"]))
    print(told["reason"], round(told["deadline"] - time.time()), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("reason", ["stopped", "failure"])
def test_a_program_is_told_why_and_until_when_before_sigterm(tmp_path: Path, reason: str) -> None:
    live = LiveRun(tmp_path, two_by_two(TOLD).replace("grace_s: 1", "grace_s: 50"))
    for rank in range(4):
        live.wait_for_output("ready", rank)
    if reason == "stopped":
        live.interrupt()
    else:
        os.kill(live.pid_of(3), signal.SIGKILL)
    assert live.end() == (130 if reason == "stopped" else 137)
    told = live.run.attempt(0).out(0).read_text().split()
    assert told[:2] == ["ready", reason]
    assert int(told[2]) in range(20, 51)


def test_a_save_that_a_nodes_sigterm_began_survives_the_supervisors(tmp_path: Path) -> None:
    """As scancel and scontrol requeue send it: to the agents, and an instant later to the supervisor."""
    live = LiveRun(tmp_path, SAVING)
    live.wait_for("first_step")
    os.kill(agent(live, 1), signal.SIGTERM)
    live.wait_for("draining")
    os.kill(live.process.pid, signal.SIGTERM)
    assert live.end() == 130
    (saved,) = live.events("saved")
    assert live.verdict()["message"] == f"stopped by SIGTERM; saved after step {saved['step']}"
    wait_until(lambda: not live.left(), "the end of everything")
