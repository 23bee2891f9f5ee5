"""Checkpoints in the memory of real hosts: one of four loses its power, and the others have all of its state."""

import json
from pathlib import Path

import pytest

from muster.jobs.basics.files import read_lines
from support.box import LiveBox
from support.exact_jobs import STEPS, TRAIN, tokens
from support.live import LiveRun, wait_until
from support.resuming import hashes

pytestmark = [pytest.mark.command, pytest.mark.cluster, pytest.mark.timeout(200)]


def job(nodes: int, pause_s: float, **checkpoint: int) -> str:
    described = {
        "name": "copies",
        "nodes": nodes,
        "threads_per_rank": 1,
        "grace_s": 1,
        "train": {**TRAIN, "data": tokens(pause_s), "mode": "zero3"},
        "checkpoint": {"every_steps": 100_000, **checkpoint},
        "restart": {"max": 3, "min_nodes": 1, "backoff": 0.0},
    }
    return json.dumps(described)


def test_after_a_power_loss_in_zero3_the_state_comes_from_the_memory_of_peers(box: LiveBox, tmp_path: Path) -> None:
    for name in ("hurt", "whole"):
        (tmp_path / name).mkdir()
    live = LiveRun(tmp_path / "hurt", job(4, pause_s=0.04, memory_every_steps=5), "--hosts", box.spelt, "--on", "ssh")
    wait_until(lambda: any(row["step"] >= 15 for row in live.events("copied")), "the copies of step 15")
    box.fail("node2", "power")
    try:
        assert live.end() == 0, live.err
    finally:
        box.heal("node2")
    first, second = read_lines(live.run.attempts)
    assert (first["class"], second["world_size"]) == ("unreachable", 3)
    assert second["from"].endswith(" in memory")
    assert second["from_step"] >= 15
    assert [row["step"] for row in live.events("saved")] == [STEPS]  # nothing else was on the disk
    whole = LiveRun(tmp_path / "whole", job(1, pause_s=0.0))
    assert whole.end() == 0, whole.err
    assert hashes(live.run.path) == hashes(whole.run.path)
