"""Predictions count the messages that a trace of the engine counts, in every mode."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from muster.collectives_bench.cost.exposed import ALL_GATHERS, EXPOSED, NO_COMPUTE, REDUCE_SCATTERS, Times
from muster.collectives_bench.cost.modes import WAYS, cut, messages
from muster.collectives_bench.cost.profile import link
from muster.ddp.collective_log import LOG
from muster.jobs.models.shapes import POOL, VGG_SHAPES, VggShape
from muster.jobs.spec.job import Job
from muster.jobs.spec.modes import MODES, PIPELINES
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.trainer import build_trainer
from muster.jobs.world.world import World
from muster.launch.bench.loads import load_of
from muster.pipe.tensor.region import Region

TINY_VGG = VggShape("vgg-tiny", (8, POOL, 8, POOL, 16, POOL, 16, POOL, 16, POOL))
SHAPE = {"d_model": 64, "d_ff": 128, "layers": 3, "heads": 2, "context": 16, "vocabulary": 128}
GPT = {"model": SHAPE, "data": "synthetic", "batch_size": 8, "evaluate": False, "device": "cpu"}
VGG = {**GPT, "model": "vgg-tiny", "data": "digits"}
TWICE = {"grad_accumulation": 2}
REGION = {"begin_sum": "all_reduce", "begin_maximum": "all_reduce", "begin_gather": "all_gather"}
REGION["begin_scatter_sum"] = "reduce_scatter"
PADDED = 0.3  # shards of sharded parameters are aligned: a tiny layer grows


def watch(found: list[list[Any]], trainer: Any) -> None:
    """Add the exchanges that are not in the log: those of split layers, and of torch's wrapper."""
    for name, operation in REGION.items():
        real = getattr(Region, name)

        def watched(region: Region, x: torch.Tensor, real: Any = real, operation: str = operation) -> Any:
            found.append([operation, x.nbytes * (region.ranks if operation == "all_gather" else 1)])
            return real(region, x)

        setattr(Region, name, watched)
    if trainer.settings.mode == "ddp":

        def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            found.append(["all_reduce", bucket.buffer().nbytes])
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        trainer.engine.replica.wrapper.register_comm_hook(None, hook)


def traced(world: World, settings: dict[str, Any]) -> list[list[Any]]:
    """Return the operations and bytes of the second step."""
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    job = TrainSettings.model_validate(settings)
    trainer, found = build_trainer(job, open_data(job), world), list[list[Any]]()
    watch(found, trainer)
    reader = trainer.own_steps()
    trainer.clock.start()
    trainer.engine.train_step(0, reader[0].shards)
    found.clear()
    trainer.engine.replica.settle()
    LOG.begin(lambda: 0.0, torch.device("cpu"))
    trainer.engine.train_step(1, reader[1].shards)
    trainer.engine.replica.settle()
    if trainer.engine.stages is not None:
        sends = [each.step for each in trainer.engine.stages.pipeline.spans if type(each.step).__name__ == "Send"]
        return [["send", len(sends)]]
    return found + [[each.operation, each.bytes] for each in LOG.end()]


def kind_of(operation: str) -> str:
    """Return the operation as benches name it: shared memory and rings replace some calls."""
    if operation == "gather and scatter":
        return "gather_scatter"
    if operation == "all_to_all" or operation.startswith("reduce_scatter"):
        return "reduce_scatter"
    return "all_gather" if operation.startswith("all_gather") else operation


class Asked(Times):
    """Times that record what they are asked for."""

    def __init__(self, load: Any) -> None:
        super().__init__(link(1e9), load, 2, "seconds")
        self.found: list[tuple[str, int]] = []

    def of(self, operation: str, nbytes: int, **options: Any) -> float:
        self.found.append((operation, nbytes))
        return super().of(operation, nbytes, **options)

    def best(self, operations: Any, nbytes: int) -> float:
        names = {ALL_GATHERS[0]: "all_gather", REDUCE_SCATTERS[0]: "reduce_scatter"}
        self.found.append((names.get(operations[0], operations[0]), nbytes))
        return super().of(operations[0], nbytes)


def predicted(settings: dict[str, Any]) -> Any:
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    job = Job.model_validate({"kind": "train", "settings": TrainSettings.model_validate(settings)})
    return load_of(job, ranks=2, backend="gloo")


SPLITS = [
    *({**GPT, "mode": mode} for mode in MODES if mode not in ("single", *PIPELINES)),
    *({**VGG, "mode": mode} for mode in ("bucketed", "zero1", "zero3", "fsdp")),
    *({**GPT, "mode": "bucketed", "bucket_size_mb": 0.05},),
    *({**GPT, "mode": mode, **TWICE} for mode in ("flat", "zero1", "zero3", "fsdp", "tensor")),
    *({**GPT, "mode": mode, **TWICE, "accumulate": "sharded"} for mode in ("zero3", "fsdp")),
    *({**GPT, "mode": mode, "reshard_after_forward": False} for mode in ("zero3", "fsdp")),
    *({**GPT, "mode": "tensor", "sequence_parallel": True, "activation_checkpointing": each} for each in (True, False)),
    {**GPT, "mode": "tensor", "activation_checkpointing": True},
    {**GPT, "mode": "tensor", "precision": "bf16"},
]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("settings", SPLITS, ids=lambda each: " ".join(map(str, list(each.values())[5:])))
def test_a_prediction_counts_the_messages_of_the_engine(on_ranks: Any, settings: dict[str, Any]) -> None:
    times = Asked(predicted(settings))
    EXPOSED[settings["mode"]](times.load, NO_COMPUTE, times)
    wanted = sorted(times.found)
    for found in on_ranks(2, traced, settings=settings):
        told = sorted((kind_of(operation), nbytes) for operation, nbytes in found)
        assert [operation for operation, _ in told] == [operation for operation, _ in wanted]
        assert [nbytes for _, nbytes in told] == pytest.approx([nbytes for _, nbytes in wanted], rel=PADDED)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in PIPELINES if mode != "terapipe"])
def test_a_prediction_counts_the_messages_of_a_pipeline(on_ranks: Any, mode: str) -> None:
    settings, schedule = {**GPT, "mode": mode}, WAYS[mode].schedule
    load = predicted(settings)
    assert schedule is not None
    stages = cut(load.model, schedule, 2)
    assert stages is not None
    passes = load.microbatches if schedule.splits_batch else 1
    found = on_ranks(2, traced, settings=settings)
    assert sum(count for ((_, count),) in found) == 2 * passes * len(messages(stages, schedule))
