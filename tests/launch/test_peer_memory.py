"""Checkpoints in the memory of the nodes: real agents, ranks and gloo, and the bits of an uninterrupted run.

The nodes are agents of one machine. Their memory is as separate as that of hosts: a killed agent's is never read again.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import read_lines
from muster.launch.node.copies import SHARED_MEMORY
from support.bench import free_port
from support.exact_jobs import STEPS, TRAIN
from support.live import LiveRun, wait_until
from support.programs import Programs
from support.resuming import hashes

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(250)]
pytestmark += [pytest.mark.usefixtures("forked_supervisors")]

CHECKPOINT = {"every_steps": 1000, "memory_every_steps": 5}


def job(*, nodes: int = 4, train: dict[str, Any] | None = None, checkpoint: Any = CHECKPOINT, **restart: Any) -> str:
    described = {
        "nodes": nodes,
        "ranks_per_node": 1,
        "grace_s": 1.0,
        "train": {**TRAIN, **(train or {})},
        "checkpoint": checkpoint,
        "restart": {"max": 5, "backoff": 0.0, **restart},
    }
    return json.dumps(described)


def wait_copied(live: LiveRun, step: int) -> None:
    wait_until(lambda: any(row["step"] >= step for row in live.events("copied")), f"the copies of step {step}")


def started(live: LiveRun, attempt: int) -> dict[int, int]:
    """Return {rank: pid}."""
    wait_until(lambda: [row for row in live.events("joined") if row["attempt"] == attempt], f"attempt {attempt}")
    rows = [row for row in live.events("started") if row["attempt"] == attempt]
    return {int(rank): int(pid) for row in rows for rank, pid in row["ranks"]}


def agent_of(live: LiveRun, rank: int) -> int:
    """Return the pid of the agent of a node with one rank."""
    return json.loads(live.run.attempt(0).node(rank).read_text())["pid"]


def memory_of(live: LiveRun, rank: int) -> Path:
    """Return the folder in memory of a node with one rank: its agent holds the lock in it."""
    links = (each.readlink() for each in Path(f"/proc/{agent_of(live, rank)}/fd").iterdir() if each.is_symlink())
    return next(path.parent for path in links if path.name == "lock" and path.parent.parent == SHARED_MEMORY)


@pytest.mark.parametrize("mode", [pytest.param("allreduce", marks=pytest.mark.soak), "zero3"])
def test_after_kill_9_of_a_rank_the_run_continues_from_memory(tmp_path: Path, uninterrupted: Any, mode: str) -> None:
    train = {"mode": mode}
    live = LiveRun(tmp_path, job(train=train))
    wait_copied(live, 15)
    folders = [memory_of(live, rank) for rank in range(4)]
    assert all(folder.is_dir() for folder in folders)
    os.kill(started(live, 0)[2], signal.SIGKILL)
    assert live.end() == 0, live.err
    first, second = read_lines(live.run.attempts)
    assert second["from"].endswith(" in memory")
    assert second["from_step"] >= 15
    assert first["lost_steps"] == first["last_step"] - second["from_step"]
    (loaded,) = live.events("loaded")
    assert loaded["step"] == second["from_step"]
    assert live.events("saved")[0]["step"] == STEPS  # nothing else was on the disk
    assert hashes(live.run.path) == uninterrupted(train)
    assert live.left() == []
    assert not any(folder.exists() for folder in folders)  # their memory is free again


def test_a_lost_node_in_zero3_loses_few_steps(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job(train={"mode": "zero3"}, min_nodes=3))
    wait_copied(live, 15)
    folder = memory_of(live, 1)
    os.kill(agent_of(live, 1), signal.SIGKILL)
    assert live.end() == 0, live.err
    rows = [*read_lines(live.run.attempts)]
    assert rows[1]["world_size"] == 3
    assert rows[1]["from"].endswith(" in memory")
    assert rows[0]["lost_steps"] == rows[0]["last_step"] - rows[1]["from_step"]
    assert hashes(live.run.path) == uninterrupted({"mode": "zero3"})
    assert not folder.exists()  # the rank parent has deleted it


@pytest.mark.soak
def test_two_nodes_with_copies_of_each_other_are_lost_and_the_disk_is_used(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job(checkpoint={"every_steps": 20, "memory_every_steps": 7}))
    live.wait_for("saved")
    wait_copied(live, 21)
    for node in (1, 2):
        os.kill(agent_of(live, node), signal.SIGSTOP)  # so that both are lost at once
    for node in (1, 2):
        os.kill(agent_of(live, node), signal.SIGKILL)
    assert live.end() == 0, live.err
    (lost,) = live.events("not_in_memory")
    assert "was in memory, but the shards of rank 1 were lost with" in lost["why"]
    rows = [*read_lines(live.run.attempts)]
    assert not rows[1]["from"].endswith(" in memory")
    assert rows[1]["from_step"] % 20 == 0
    assert "using the newest checkpoint on disk" in live.err
    assert hashes(live.run.path) == uninterrupted({})


def next_shard(live: LiveRun, folder: Path) -> str:
    """Wait until a node has written its shard of a checkpoint that is not complete; return its name."""
    found: list[str] = []

    def look() -> list[str]:
        complete = max(row["checkpoint"] for row in live.events("copied"))
        names = (path.parent.name for path in folder.glob("checkpoints/step-*/shard-00001.ok"))
        found[:] = [name for name in names if name > complete]
        return found

    wait_until(look, "a shard that is being copied")
    return found[0]


@pytest.mark.soak
def test_a_node_is_lost_while_it_receives_copies(tmp_path: Path, uninterrupted: Any) -> None:
    live = LiveRun(tmp_path, job())
    wait_copied(live, 10)
    folder = memory_of(live, 1)
    os.kill(agent_of(live, 2), signal.SIGSTOP)  # it accepts connections, and answers none
    try:
        begun = next_shard(live, folder)
    finally:
        os.kill(agent_of(live, 2), signal.SIGKILL)
    assert live.end() == 0, live.err
    second = [*read_lines(live.run.attempts)][1]
    assert second["from"].endswith(" in memory")
    assert second["from"].removesuffix(" in memory") <= begun
    assert hashes(live.run.path) == uninterrupted({})


PROGRAM = """
import time, torch, muster
import torch.distributed as dist

run = muster.session()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(32, 32)
velocity = [torch.zeros_like(each) for each in model.parameters()]  # PyTorch's optimizers import its compiler
state = run.state(model=model, velocity=velocity, total=0.0)
for step in run.steps(40, state):
    time.sleep(0.1)
    torch.manual_seed(1000 * step + run.rank)
    loss = model(torch.randn(8, 32)).square().mean()
    gradients = torch.autograd.grad(loss, model.parameters())
    for parameter, gradient, speed in zip(model.parameters(), gradients, state.velocity):
        dist.all_reduce(gradient)
        with torch.no_grad():
            parameter -= 1e-2 * speed.mul_(0.9).add_(gradient)
    state.total += float(loss.detach())
    run.log(loss=loss)
"""


def test_a_program_with_a_session_continues_from_memory(tmp_path: Path, programs: Programs) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    described = {
        "nodes": 2,
        "ranks_per_node": 1,
        "grace_s": 1.0,
        "command": [sys.executable, str(tmp_path / "program.py")],
        "checkpoint": CHECKPOINT,
        "restart": {"max": 5, "backoff": 0.0},
    }
    hurt = LiveRun(tmp_path, json.dumps(described))
    wait_copied(hurt, 15)
    os.kill(started(hurt, 0)[1], signal.SIGKILL)
    assert hurt.end() == 0, hurt.err
    _, second = read_lines(hurt.run.attempts)
    assert second["from"].endswith(" in memory")
    assert second["from_step"] >= 15
    assert f"continues from {second['from']} of the nodes".replace(" in memory", " in the memory") in (
        hurt.run.attempt(1).out(0).read_text()
    )
    assert [row["step"] for row in hurt.events("saved")] == [40]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    group |= {"MUSTER_RUNS": str(tmp_path / "whole")}
    ranks = [{**os.environ, **group, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    whole = [programs.start(tmp_path / "program.py", env=environ) for environ in ranks]
    assert [rank.wait().returncode for rank in whole] == [0, 0]
    runs = (hurt.run.path, next((tmp_path / "whole").glob("[!.]*")))
    ends = [{key: value for key, value in hashes(run).items() if "rng/" not in key} for run in runs]
    assert ends[0] == ends[1]  # but for the generators of Python and NumPy, which the program does not seed
