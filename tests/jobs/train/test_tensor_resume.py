"""Checkpoints of split layers: the tensors of the whole model, which every other split reads, too."""

import json
from pathlib import Path

import pytest

from muster.jobs.basics.files import read_lines
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.runfolder.rundir import RunDir
from support.resuming import ADAMW, agree_within_rounding, attempt

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MODEL = {"d_model": 16, "d_ff": 32, "layers": 2, "heads": 4, "context": 16}  # its head is its embedding
JOB = {"model": MODEL, "data": "synthetic", "batch_size": 12, "optimizer": ADAMW, "precision": "fp64", "clip_norm": 0.3}
JOB |= {"steps": 12, "log_every": 3}
ON_FOUR = [
    {"parallel": {"tensor": 2, "data": 2, "zero": 1}},
    {"mode": "zero2"},
    {"parallel": {"tensor": 2, "pipe": 2}},
    {"mode": "tensor"},
    {"mode": "1f1b"},
    {"parallel": {"tensor": 2, "data": 2, "sync": "flat"}, "sequence_parallel": True},
]
ON_TWO = [{"mode": "ddp"}, {"mode": "tensor", "sequence_parallel": True}, {"mode": "zbv"}, {"mode": "zero3"}]


def attempts(world, folder: str, ways: list[dict], first: int, last: int | None) -> list[int]:
    """Make attempts one after another, a step each, but for the last."""
    stops = [number + 1 for number in range(first, first + len(ways) - 1)] + [last]
    return [
        attempt(world, folder, {**JOB, **way}, number, stop_at)
        for number, (way, stop_at) in enumerate(zip(ways, stops, strict=True), start=first)
    ]


def test_state_moves_between_split_layers_replicas_shards_pipelines_and_one_process(on_ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    alone = {**JOB, "mode": "single"}
    assert on_ranks(1, attempt, folder=str(whole), settings=alone) == [0]
    step = len(ON_FOUR)
    assert on_ranks(4, attempts, folder=str(parts), ways=ON_FOUR, first=0, last=step) == [[75] * step] * 4
    more = len(ON_TWO)
    assert on_ranks(2, attempts, folder=str(parts), ways=ON_TWO, first=step, last=step + more) == [[75] * more] * 2
    assert on_ranks(1, attempt, folder=str(parts), settings=alone, number=step + more) == [0]
    agree_within_rounding(parts, whole)
    found, wanted = (evaluation(folder) for folder in (parts, whole))
    assert found == pytest.approx(wanted, rel=1e-12)


def evaluation(folder: Path) -> float:
    return next(row["loss"] for row in read_lines(RunDir(folder).metrics) if row.get("evaluation"))


def test_ranks_share_the_writing_and_every_rank_knows_the_loss(on_ranks, tmp_path):
    tmp_path.joinpath("run").mkdir()
    job = {**JOB, "steps": 2, "parallel": {"tensor": 2, "data": 2, "sync": "bucketed"}, "evaluate": True}
    assert on_ranks(4, attempt, folder=str(tmp_path / "run"), settings=job) == [0] * 4
    run = RunDir(tmp_path / "run")
    own = [read_lines(run.attempt(0).metrics(rank)) for rank in range(4)]
    losses = [[row["loss"] for row in rows] for rows in own]
    assert losses[0] == losses[1], "those that read the same part of a batch"
    assert losses[2] == losses[3]
    assert losses[0] != losses[2]
    of_run = [row["loss"] for row in read_lines(run.metrics) if not row.get("evaluation")]
    assert of_run == pytest.approx([(first + second) / 2 for first, second in zip(losses[0], losses[2], strict=True)])
    chosen = newest_good(run)
    assert chosen is not None
    sizes = [path.stat().st_size for path in sorted(chosen.folder.path.glob("shard-*.safetensors"))]
    assert max(sizes) < 1.3 * sum(sizes) / 4, json.dumps(sizes)
