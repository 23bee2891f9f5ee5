"""A training on four nodes of a box whose network is cut, or whose agents are killed: it goes on, and grows back."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.cli import main
from support.box import LiveBox
from support.exact_jobs import GPT, tokens
from support.live import LiveRun, wait_until
from support.terminals import through_pipes

pytestmark = [pytest.mark.command, pytest.mark.cluster, pytest.mark.timeout(300)]
pytestmark += [pytest.mark.usefixtures("forked_supervisors", "forked_ranks")]  # ranks: of who nothing happens to

TRAINING: dict[str, Any] = {
    "name": "outage",
    "nodes": 4,
    "threads_per_rank": 1,
    "grace_s": 1,
    "hang_s": 8,
    "train": {
        "model": {**GPT, "vocabulary": 64},
        "data": tokens(pause_s=0.1),  # the fewer steps there are, the sooner one process has repeated them
        "mode": "allreduce",
        "exact": True,
        "virtual_ranks": 12,
        "batch_size": 12,
        "steps": 1_000_000,
        "log_every": 1,
        "evaluate": False,
    },
    "checkpoint": {"every_steps": 5},
}
ONE_SIDE, OTHER_SIDE = ("node0", "node1"), ("node2", "node3")


def start(box: LiveBox, folder: Path, **restart: Any) -> LiveRun:
    """Start the training over ssh, and wait for its first checkpoint."""
    live = LiveRun(folder, json.dumps({**TRAINING, "restart": restart}), "--hosts", box.spelt, "--on", "ssh")
    live.wait_for("saved")
    return live


def begun(live: LiveRun, world_size: int, after: int = 0) -> int:
    """Wait until an attempt of so many ranks, with a number above `after`, makes steps; return its number."""
    found: list[int] = []

    def is_there() -> bool:
        sizes = {row["attempt"]: row["world_size"] for row in live.events("attempt")}
        steps = [row["attempt"] for row in live.events("first_step")]
        found[:] = [attempt for attempt in steps if attempt > after and sizes[attempt] == world_size]
        return bool(found) or live.process.poll() is not None

    wait_until(is_there, f"steps of {world_size} ranks")
    assert found, live.process.communicate()[1][-2000:]
    return found[0]


@contextmanager
def apart(box: LiveBox) -> Iterator[None]:
    """Cut the ways between two and two nodes; the supervisor still reaches all."""
    ways = [(a, b) for a in ONE_SIDE for b in OTHER_SIDE]
    addresses = {host.name: host.address for host in box.hosts.hosts}

    def call(verb: str) -> None:
        for a, b in [*ways, *((b, a) for a, b in ways)]:
            done = box.exec(a, ["ip", "route", verb, "blackhole", f"{addresses[b]}/32"])
            assert done.returncode == 0, done.stderr

    call("add")
    try:
        yield
    finally:
        call("del")


def stop(live: LiveRun) -> list[dict[str, Any]]:
    """Stop the run, which saves; return the rows of its attempts."""
    live.process.send_signal(signal.SIGINT)
    assert live.end() == exits.STOPPED, live.err
    assert live.left() == []
    return list(read_lines(live.run.attempts))


def losses(run: RunDir) -> dict[int, float]:
    """The loss of each step; one that was done again counts once, and one without all of its samples not at all."""
    rows = (row for row in read_lines(run.metrics) if "step_s" in row and not row.get("lost_samples"))
    return {row["step"]: row["loss"] for row in rows}


def check_losses(live: LiveRun, folder: Path, *, lacking: int = 0) -> None:
    """Compare with one process that nothing happened to, bit by bit. `lacking`: steps that may have no row."""
    found = losses(live.run)
    steps = f"train.steps={max(found)}"
    folder.mkdir()
    unpaced = {**TRAINING, "train": {**TRAINING["train"], "data": tokens(pause_s=0.0)}}
    (folder / "job.yaml").write_text(json.dumps(unpaced))
    argv = ["run", str(folder / "job.yaml"), "--runs", str(folder / "runs")]
    assert main([*argv, "--set", "nodes=1", "--set", steps]) == 0
    (reference,) = (folder / "runs").iterdir()
    wanted = losses(RunDir(reference))
    assert len(wanted) - len(found) <= lacking
    assert found == {step: wanted[step] for step in found}


def test_a_cut_network_costs_the_smaller_part_and_the_run_grows_back(box: LiveBox, tmp_path: Path) -> None:
    live = start(box, tmp_path, max=20, min_nodes=1)
    with apart(box):
        fewer = begun(live, 2)
        assert live.events("attempt")[-1]["hosts"] == [*ONE_SIDE]
    again = begun(live, 4, after=fewer)
    ended = stop(live)
    assert [row["attempt"] for row in ended] == list(range(again + 1))  # one that could not begin has its number, too
    assert [row["class"] for row in ended[fewer - 1 :]] == ["unreachable", "requeue", "stopped"]
    assert ended[fewer]["lost_steps"] == 0
    _, out, _ = through_pipes("why", live.run.run_id, "--runs", str(live.root))
    assert f"{again + 1} attempts, {fewer} failed" in out
    check_losses(live, tmp_path / "reference")


@pytest.mark.soak
def test_a_job_that_needs_all_nodes_waits_a_cut_network_out(box: LiveBox, tmp_path: Path) -> None:
    live = start(box, tmp_path, max=20)
    with apart(box):
        live.wait_for("restarting", 5)  # a hang, then four starts in vain: 93 came after three
    begun(live, 4, after=4)
    ended = stop(live)
    assert [row["class"] for row in ended[1:5]] == ["unreachable"] * 4
    assert len({row["attempt"] for row in ended}) == len(ended)
    check_losses(live, tmp_path / "reference")


def test_an_agent_that_was_killed_on_a_healthy_node_comes_back(box: LiveBox, tmp_path: Path) -> None:
    live = start(box, tmp_path, max=2, min_nodes=1)
    for node in (2, 3):
        attempt = live.events("attempt")[-1]["attempt"]
        place = json.loads(live.run.attempt(attempt).placement.read_text())["nodes"]
        rank = next(each["node_rank"] for each in place if each["host"] == f"node{node}")
        pid = json.loads(live.run.attempt(attempt).node(rank).read_text())["pid"]
        assert box.exec(f"node{node}", ["kill", "-9", str(pid)]).returncode == 0
        fewer = begun(live, 3, after=attempt)
        begun(live, 4, after=fewer)
    ended = stop(live)
    assert [row["world_size"] for row in ended] == [4, 3, 4, 3, 4]
    assert [row["class"] for row in ended] == ["unreachable", "requeue", "unreachable", "requeue", "stopped"]
    check_losses(live, tmp_path / "reference")


def lose_and_regain(box: LiveBox, live: LiveRun, how: str) -> list[dict[str, Any]]:
    """Lose the node with the store and with rank 0, and heal it when the others continue; return the attempts."""
    box.fail("node0", how)
    try:
        fewer = begun(live, 3)
    finally:
        box.heal("node0")
    begun(live, 4, after=fewer)
    ended = stop(live)
    assert [row["world_size"] for row in ended] == [4, 3, 4]
    return ended


@pytest.mark.soak  # the test below loses a node in the same way
@pytest.mark.parametrize("how", ["unplug", "kill"])
def test_three_nodes_continue_in_place_and_the_fourth_joins_them(box: LiveBox, tmp_path: Path, how: str) -> None:
    live = start(box, tmp_path, max=20, min_nodes=1, in_place="auto")
    ended = lose_and_regain(box, live, how)
    assert [row["lost_steps"] for row in ended[:2]] == [0, 0]
    assert live.events("loaded") == []  # nothing came from the disk
    check_losses(live, tmp_path / "reference", lacking=1)  # the row of the last step before the loss


def test_sharded_nodes_continue_in_place_from_the_memory_of_each_other(box: LiveBox, tmp_path: Path) -> None:
    sharded = {**TRAINING, "train": {**TRAINING["train"], "mode": "zero1"}}
    sharded |= {"checkpoint": {"every_steps": 1_000_000, "memory_every_steps": 5}}
    restart = {"max": 20, "min_nodes": 1, "in_place": "auto"}
    live = LiveRun(tmp_path, json.dumps({**sharded, "restart": restart}), "--hosts", box.spelt, "--on", "ssh")
    live.wait_for("copied")
    ended = lose_and_regain(box, live, "unplug")  # its connections do not close
    assert [row["from"].endswith(" in memory") for row in ended[1:]] == [True, True]
    copies = [row["step"] for row in live.events("copied") if row["attempt"] == 0]
    assert ended[1]["from_step"] >= max(copies)  # no complete copy was left out
    assert ended[1]["lost_steps"] == 0  # the state was copied before the fourth node joined
    assert live.events("not_in_place") == []
    check_losses(live, tmp_path / "reference")
