"""Checkpoints in the memory of the nodes: real agents, ranks and gloo; every run ends with an uninterrupted one's bits.

The nodes are agents of one machine. Their memory is as separate as that of hosts: an agent deletes its own when it ends,
and a killed agent's is never read again.
"""

import json
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import read_lines
from muster.launch.node.copies import prefix
from support.live import LiveRun, wait_until
from support.resuming import hashes

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 60
MODEL = {"d_model": 32, "d_ff": 64, "layers": 1, "heads": 2, "context": 32, "dropout": 0.1}
TRAIN: dict[str, Any] = {
    "model": MODEL,
    "data": "synthetic",
    "mode": "allreduce",
    "exact": True,
    "virtual_ranks": 12,
    "batch_size": 24,
    "steps": STEPS,
    "log_every": 1,
    "evaluate": False,
    "optimizer": {"name": "adamw", "lr": 1e-3},
}
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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the hashes of the last checkpoint of a run of one rank, for some settings."""

    @cache
    def of(text: str) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("whole")
        live = LiveRun(folder, job(nodes=1, train=json.loads(text), checkpoint={"every_steps": 1000}))
        assert live.end() == 0, live.err
        return hashes(live.run.path)

    return lambda train: of(json.dumps(train))


def wait_copied(live: LiveRun, step: int) -> None:
    wait_until(lambda: any(row["step"] >= step for row in live.events("copied")), f"the copies of step {step}")


def started(live: LiveRun, attempt: int) -> dict[int, int]:
    """Return {rank: pid}."""
    wait_until(lambda: [row for row in live.events("joined") if row["attempt"] == attempt], f"attempt {attempt}")
    rows = [row for row in live.events("started") if row["attempt"] == attempt]
    return {int(rank): int(pid) for row in rows for rank, pid in row["ranks"]}


@pytest.mark.parametrize("mode", ["allreduce", "zero3"])
def test_after_kill_9_of_a_rank_the_run_continues_from_memory(tmp_path: Path, uninterrupted: Any, mode: str) -> None:
    train = {"mode": mode}
    live = LiveRun(tmp_path, job(train=train))
    wait_copied(live, 15)
    os.kill(started(live, 0)[2], signal.SIGKILL)
    assert live.end() == 0, live.err
    first, second = read_lines(live.run.attempts)
    assert second["from"].endswith(" in memory") and second["from_step"] >= 15
    assert first["lost_steps"] <= 10
    (loaded,) = live.events("loaded")
    assert loaded["step"] == second["from_step"]
    assert live.events("saved")[0]["step"] == STEPS  # nothing else was on the disk
    assert hashes(live.run.path) == uninterrupted(train)
    assert live.left() == []
    assert [*Path("/dev/shm").glob(f"{prefix()}*")] == []
