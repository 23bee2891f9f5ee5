"""The ways to stop a `muster run` or to kill a part of it: nothing is left, and the verdict says what happened."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from muster.jobs.machine.linux import descendants, kill_quietly
from muster.launch.common.processes import command_line, of_run, start_ticks
from support.live import SLEEP, TRAINING, LiveRun, argv, parent_of, two_by_two, wait_until

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("forked_supervisors")]

STUBBORN = (Path(__file__).parents[2] / "benchmarks" / "stubborn.py").read_text()


def kill_and_outlive(live: LiveRun) -> None:
    """Kill a supervisor; wait until everything of its run has ended with it."""
    run_id = live.run.run_id
    live.process.kill()
    live.process.wait()
    wait_until(lambda: not of_run(run_id), "all of a run to end with its supervisor")
    live.process.communicate()


@pytest.mark.parametrize("job", [two_by_two(STUBBORN), TRAINING], ids=["stubborn", "training"])
def test_nothing_is_left_after_the_supervisor_is_killed(tmp_path: Path, job: str) -> None:
    live = LiveRun(tmp_path, job)
    live.wait_for("started", 2)
    if "train" in job:
        live.wait_for("joined")
    else:
        live.wait_for_output("ready", 3)
    assert len(of_run(live.run.run_id)) >= 4
    kill_and_outlive(live)


def test_ctrl_c_ends_stubborn_ranks_after_the_grace(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(STUBBORN))
    for rank in range(4):
        live.wait_for_output("ready", rank)
    live.interrupt()
    assert live.end() == 130
    assert not live.left()
    assert live.verdict()["message"] == "stopped by Ctrl-C"
    (ended,) = live.events("ended")
    assert ended["class"] == "stopped"


@pytest.mark.parametrize(("nohup", "by"), [(False, "SIGHUP"), (True, "Ctrl-C")])
def test_a_closed_terminal_ends_a_run_unless_it_was_started_by_nohup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nohup: bool, by: str
) -> None:
    monkeypatch.setattr(LiveRun, "programs", None)  # it inherits what this process ignores
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        live = LiveRun(tmp_path, two_by_two(SLEEP))
    finally:
        signal.signal(signal.SIGHUP, before)
    live.wait_for("started", 2)
    status = Path(f"/proc/{live.process.pid}/status").read_text()
    assert int(status.partition("SigIgn:")[2].split()[0], 16) & 1 == nohup
    live.process.send_signal(signal.SIGHUP)
    if nohup:
        live.interrupt()
    assert live.end() == 130
    assert live.verdict()["message"] == f"stopped by {by}"


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(STUBBORN).replace("grace_s: 1", "grace_s: 1000"))
    live.wait_for("started", 2)
    live.wait_for_output("ready", 0)
    live.interrupt()
    live.wait_for("stopping")
    live.interrupt()
    assert live.end() == 130
    assert not live.left()


def test_ctrl_c_before_the_ranks_have_started_ends_at_once(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, TRAINING)
    live.wait_for("submitted")
    live.interrupt()
    assert live.end() == 130
    assert not live.left()


def test_ranks_may_end_by_themselves_within_the_grace(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved')); " + SLEEP
    live = LiveRun(tmp_path, two_by_two(code).replace("grace_s: 1", "grace_s: 1000"))
    for rank in range(4):
        live.wait_for_output("ready", rank)
    live.interrupt()
    assert live.end() == 130
    assert live.run.attempt(0).err(2).read_text() == "saved\n"


def test_background_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    live = LiveRun(tmp_path, two_by_two(code))
    assert live.end() == 0
    assert not live.left()


def test_an_agent_killed_before_it_answers_ends_the_run_at_once(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP, start_timeout_s=1000))
    live.wait_for("submitted")
    agents: list[int] = []

    def found() -> bool:
        agents[:] = [pid for pid in descendants(live.process.pid) if "muster.launch.agent" in command_line(pid)]
        return bool(agents)

    wait_until(found, "an agent")
    os.kill(agents[0], signal.SIGKILL)
    assert live.end() == 69
    assert "Traceback" not in live.err
    assert not live.left()


def test_a_killed_rank_parent_loses_its_node_without_a_traceback(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    os.kill(parent_of(live.pid_of(2)), signal.SIGKILL)
    assert live.end() == 69
    assert "Traceback" not in live.err
    assert "rank parent has ended" in live.verdict()["message"]
    assert not live.left()


def test_a_frozen_rank_parent_does_not_survive_its_run(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    os.kill(parent_of(live.pid_of(2)), signal.SIGSTOP)
    kill_and_outlive(live)


def test_a_frozen_agent_is_noticed_by_its_silence(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, two_by_two(SLEEP))
    live.wait_for("started", 2)
    record = json.loads(live.run.attempt(0).node(0).read_text())
    assert start_ticks(record["pid"]) == record["pid_start"]
    os.kill(record["pid"], signal.SIGSTOP)
    assert live.end() == 69
    assert "silent" in live.verdict()["message"]
    assert not live.left()


def starve(root: int, *, cycles: int, stopped_s: float, running_s: float) -> None:
    """Stop a process and its descendants, let them run for a moment, and again; at the end they run."""
    for _ in range(cycles):
        family = [root, *descendants(root)]
        for number, pause_s in ((signal.SIGSTOP, stopped_s), (signal.SIGCONT, running_s)):
            for pid in family:
                kill_quietly(pid, number)
            time.sleep(pause_s)


def test_a_machine_that_hardly_runs_ends_no_run(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, f"nodes: 4\n{argv('import time; time.sleep(1)')}")
    live.wait_for("submitted")
    starve(live.process.pid, cycles=6, stopped_s=2.3, running_s=0.05)
    assert live.end() == 0, live.err
