"""Gradients of pipelines side by side are averaged while the pipelines still run, in one order, with the same bits."""

import hashlib
from typing import Any

import pytest

from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.trainer import build_trainer
from muster.jobs.world.world import World

pytestmark = pytest.mark.slow

MODEL = {"d_model": 16, "d_ff": 32, "layers": 3, "heads": 2, "context": 16}
JOB = {"model": {**MODEL, "tied": False}, "data": "synthetic", "batch_size": 11, "bucket_size_mb": 0.002, "steps": 1}
TIED = {**JOB, "model": MODEL}
SPLIT = {"data": 2, "pipe": 2, "microbatches": 3}
WAYS = {"flat": {"sync": "flat"}, "bucketed": {"sync": "bucketed"}, "zero1": {"zero": 1}, "zero2": {"zero": 2}}


def one_step(world: World, jobs: dict[str, dict]) -> dict[str, tuple[list[str], list[list[str]], str]]:
    """Train each job a step; tell what happened in which order, what each bucket has, and a hash of the gradients."""
    found = {}
    for name, job in jobs.items():
        settings = TrainSettings.model_validate(job)
        trainer = build_trainer(settings, open_data(settings), world)
        engine: Any = trainer.engine
        wrapper = engine.replica.wrapper
        log = _logged(engine.stages.pipeline, wrapper._reducer)
        engine.update = lambda: None  # gradients stay as they are
        engine.train_step(0, trainer.own_steps()[0].shards)
        bits = b"".join(each.numpy().tobytes() for _, each in sorted(engine.model.full_gradients().items()))
        buckets = [[slot.name for slot in each.slots] for each in wrapper._reducer.buckets]
        found[name] = (log, buckets, hashlib.sha256(bits).hexdigest())
    return found


def _logged(pipeline: Any, reducer: Any) -> list[str]:
    """Write down when stages have ended, tied weights are added up, and buckets are launched."""
    log: list[str] = []
    start, ties = reducer.mean.start, pipeline._ties.sum_gradients

    def starts(bucket: Any) -> Any:
        log.append("launch")
        return start(bucket)

    def sums() -> None:
        log.append("ties")
        ties()

    reducer.mean.start, pipeline._ties.sum_gradients = starts, sums
    pipeline.on_last_backward = lambda stage: log.append(f"stage {stage}")
    return log


@pytest.mark.ranks
def test_buckets_leave_in_the_last_backward_and_those_of_tied_weights_last_with_the_same_bits(on_ranks):
    jobs = {f"tied {way}": {**TIED, "parallel": {**SPLIT, **more}} for way, more in WAYS.items()}
    jobs["zbv"] = {**JOB, "parallel": {**SPLIT, **WAYS["bucketed"], "schedule": "zbv"}}
    jobs["recomputed"] = {**JOB, "activation_checkpointing": True, "parallel": {**SPLIT, **WAYS["bucketed"]}}
    for rank, found in enumerate(on_ranks(4, one_step, jobs=jobs)):
        stage = f"stage {rank // 2}"
        for name, (log, buckets, bits) in found.items():
            assert log.count("launch") == len(buckets), name
            assert log.index("ties") == len(log) - 1 - log[::-1].index("ties"), name
            if name.endswith("flat"):
                assert log == [stage, "ties", "launch"], name
                continue
            tied = [any(each in ("embed.token.weight", "head.weight") for each in bucket) for bucket in buckets]
            late = sum(tied) if name.startswith("tied") else 0
            assert log[log.index("ties") :] == ["ties", *["launch"] * late], f"rank {rank}, {name}"
            assert tied[len(tied) - late :] == [True] * late, f"rank {rank}, {name}"
            ended = [place for place, each in enumerate(log) if each.startswith("stage")]
            assert log[: ended[-1]].count("launch") == len(buckets) - late > 1, f"rank {rank}, {name}"
            assert not late or bits == found["tied flat"][2], f"rank {rank}, {name}"
