"""Attempt after attempt under one supervisor: `muster run` as a user starts it, with real agents and ranks."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.files import read_lines, write_json
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.cli import main
from support.live import LiveRun, argv, wait_until

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow, pytest.mark.usefixtures("forked_supervisors")]

OWN_PROGRAM = Path(__file__).parents[1] / "support" / "own_program.py"
# A rank sleeps until the attempt that is to end well.
FAILING = """
import os, sys, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
print("attempt", attempt, "rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
if attempt < {failures}:
    time.sleep(0 if rank == {rank} else 1000)
    sys.exit(7)
"""
MET = """
folder = os.path.join(os.environ["MUSTER_RUN_DIR"], f"attempt-{{attempt:03}}")
while not all(os.path.exists(os.path.join(folder, f"node-0{{node}}.json")) for node in range(2)):
    time.sleep(0.02)
"""
SLEEPING = FAILING.replace("time.sleep(0 if rank == {rank} else 1000)", "time.sleep(1000)")


def job(code: str, restart: str, *, nodes: int = 2) -> str:
    return f"nodes: {nodes}\nranks_per_node: 2\ngrace_s: 1\nrestart: {restart}\n{argv(code)}"


def rows(run: RunDir) -> list[dict[str, Any]]:
    return list(read_lines(run.attempts))


def agent_of(live: LiveRun, node: int) -> int:
    """The pid of a pretend node's agent."""
    record = live.run.attempt(0).node(node)
    wait_until(lambda: record.exists() and record.read_text(), f"{record}")
    return int(json.loads(record.read_text())["pid"])


def test_a_failed_rank_is_met_with_a_new_attempt_on_the_same_nodes(tmp_path: Path) -> None:
    # Rank 3 fails when both agents have written where they are, not before one of them could.
    code = FAILING.replace("if attempt", MET + "if attempt").format(failures=2, rank=3)
    live = LiveRun(tmp_path, job(code, "{max: 2, backoff: 0}"))
    assert live.end() == 0, live.err
    ended = rows(live.run)
    assert [(row["attempt"], row["code"], row["next"]) for row in ended] == [
        (0, 7, "attempt 1 on 2 nodes"),
        (1, 7, "attempt 2 on 2 nodes"),
        (2, 0, "the run is over"),
    ]
    outputs = [live.run.attempt(attempt).out(3).read_text() for attempt in range(3)]
    assert outputs == [f"attempt {attempt} rank 3 of 4\n" for attempt in range(3)]
    assert [row["code"] for row in live.events("ended")] == [0]
    assert live.left() == []
    first, second, _ = live.events("attempt")
    assert first["master_port"] != second["master_port"]
    nodes = [(live.run.attempt(attempt).node(node).read_text()) for attempt in (0, 2) for node in range(2)]
    pids = [json.loads(text)["pid"] for text in nodes]
    assert pids[:2] == pids[2:]  # the agents stay


def test_when_the_budget_is_used_up_the_run_ends_with_the_last_failure(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(FAILING.format(failures=9, rank=1), "{max: 1}"))
    assert live.end() == 7
    assert len(rows(live.run)) == 2
    assert "exited with code 7; 1 restart used up (restart.max)" in live.err
    assert [row["code"] for row in live.events("ended")] == [7]


def test_all_nodes_that_are_lost_at_once_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveRun(tmp_path, job("import time; time.sleep(1000)", "{max: 0}", nodes=4))
    live.wait_for("started", 4)
    for node in (1, 3, 2):
        os.kill(agent_of(live, node), signal.SIGKILL)
    assert live.end() == exits.UNREACHABLE
    said = live.verdict()["message"]
    assert [said.count(f"node {node} (") for node in range(4)] == [0, 1, 1, 1]
    assert "; lost too: node " in said
    assert said in live.err
    assert main(["why", live.run.run_id, "--runs", str(live.root)]) == 0
    told = capsys.readouterr().out
    assert all(f"node {node} (" in told for node in (1, 2, 3))


def test_old_attempts_keep_what_is_looked_at_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveRun(tmp_path, job(FAILING.format(failures=5, rank=1), "{max: 5, backoff: 0}"))
    assert live.end() == 0, live.err
    names = [{path.name for path in live.run.attempt(number).path.iterdir()} for number in range(6)]
    whole = {"commands", "node-00.json", "node-01.json", "placement.json"}
    logs = {f"rank-0000{rank}.out" for rank in range(4)}
    assert [whole <= each for each in names] == [True, False, False, True, True, True]
    for left in names[1:3]:  # other ranks may be stopped before they print
        assert {"rank-00001.out"} <= left <= logs | {"resume.json"}
    capsys.readouterr()
    assert main(["logs", live.run.run_id, "--attempt", "1", "--rank", "1", "--runs", str(live.root)]) == 0
    assert capsys.readouterr().out == "[rank 1 node 0] attempt 1 rank 1 of 4\n"
    assert main(["why", live.run.run_id, "--runs", str(live.root)]) == 0
    assert capsys.readouterr().out.count("exited with code 7") == 5


def test_a_lost_agent_is_started_again_where_all_nodes_are_needed(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(SLEEPING.format(failures=1), "{max: 1}"))
    live.wait_for("started", 2)
    agent = agent_of(live, 1)
    os.kill(agent, signal.SIGKILL)
    assert live.end() == 0, live.err
    lost, again = rows(live.run)
    assert (lost["class"], lost["first"]["rank"], lost["first"]["node"]) == ("unreachable", None, 1)
    assert again["world_size"] == 4
    assert live.left() == []


def test_fewer_nodes_go_on_without_waiting_for_a_lost_one(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(SLEEPING.format(failures=1), "{max: 1, min_nodes: 2}", nodes=3))
    live.wait_for("started", 3)
    os.kill(agent_of(live, 0), signal.SIGKILL)  # node 0 itself, with the store
    assert live.end() == 0, live.err
    lost, again = rows(live.run)
    assert (lost["world_size"], again["world_size"]) == (6, 4)
    assert live.run.attempt(1).out(3).read_text() == "attempt 1 rank 3 of 4\n"
    assert live.left() == []


def test_a_program_that_saves_grows_back_to_a_node_whose_agent_was_lost(tmp_path: Path) -> None:
    # Trainings do in the box: see test_outages_in_the_box.py.
    command = json.dumps([sys.executable, str(OWN_PROGRAM), "1000000", "5"])
    live = LiveRun(tmp_path, f"nodes: 2\ngrace_s: 1\ncommand: {command}\nrestart: {{max: 1, min_nodes: 1}}\n")
    live.wait_for("saved")
    os.kill(agent_of(live, 1), signal.SIGKILL)
    live.wait_for("first_step", 3)
    live.interrupt()
    assert live.end() == exits.STOPPED, live.err
    ended = rows(live.run)
    assert [(row["world_size"], row["class"]) for row in ended] == [(2, "unreachable"), (1, "requeue"), (2, "stopped")]
    assert ended[1]["cause"].startswith("stopped to continue on 2 nodes, ")
    assert ended[1]["lost_steps"] == 0
    assert live.left() == []


def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(SLEEPING.format(failures=1), "{max: 1, spares: 1}"))
    live.wait_for("started", 2)
    assert len(live.events("started")) == 2  # the spare has no ranks yet
    os.kill(agent_of(live, 1), signal.SIGKILL)
    assert live.end() == 0, live.err
    assert [row["world_size"] for row in rows(live.run)] == [4, 4]
    assert live.left() == []


def test_a_stop_during_the_wait_between_attempts_ends_the_run(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(FAILING.format(failures=9, rank=0), "{max: 5, backoff: 60}"))
    waiting = live.wait_for("restarting", 2)[1]
    assert waiting["delay_s"] == 60
    live.interrupt()
    assert live.end() == exits.STOPPED
    assert live.events("ended")[0]["message"] == "stopped by Ctrl-C"
    assert live.left() == []


def test_muster_stop_ends_the_run_and_not_only_the_attempt(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, job(SLEEPING.format(failures=9), "{max: 5}"))
    live.wait_for("started", 2)
    write_json(live.run.stop, {"time": 1.0, "grace_s": 0.5, "now": False, "by": "test"})
    assert live.end() == exits.STOPPED
    assert len(rows(live.run)) == 1
