"""Recorded steps on CUDA devices: the same training as without. `pytest -m gpu` on a machine with at least two."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.jobs.basics.files import read_lines
from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train import graph
from muster.jobs.train.data.loading import MicroInput, ShardInput
from muster.jobs.train.engine import Engine, build_engine
from muster.jobs.train.graph import EAGER_STEPS
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics import numerics_of
from muster.jobs.train.numerics.optim import set_learning_rate
from muster.jobs.train.profiling.clock import clock_for
from muster.jobs.world.world import World
from support.gpus import over
from support.live import LiveRun
from support.resuming import TINY_VGG, attempt_apart

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.command, pytest.mark.gpu, pytest.mark.ranks]

STEPS = 14
UNEVEN = (4, 9, 11, 12)  # steps of the other form: the fourth of them is recorded, too
GPT = {"model": "gpt-nano", "data": "synthetic", "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}}
VGG = {"model": "vgg-tiny", "data": "synthetic", "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}}
CASES: dict[str, dict[str, Any]] = {
    "gpt, bucketed": {**GPT, "mode": "bucketed", "bucket_size_mb": 0.05},
    "gpt, overlap, clipped": {**GPT, "mode": "overlap", "clip_norm": 0.1},
    "gpt, flat, accumulated": {**GPT, "mode": "flat", "grad_accumulation": 2},
    "gpt, allreduce, pure_bf16": {**GPT, "mode": "allreduce", "precision": "pure_bf16"},
    "gpt, bucketed, sent as bf16": {**GPT, "mode": "bucketed", "communication_dtype": "bf16"},
    "gpt, bucketed, fp16": {**GPT, "mode": "bucketed", "precision": "fp16"},
    "vgg, bucketed": {**VGG, "mode": "bucketed"},
    "vgg, bucketed, bf16": {**VGG, "mode": "bucketed", "precision": "bf16"},
    "vgg, flat, recomputed": {**VGG, "mode": "flat", "activation_checkpointing": True},
}
NANO = {**GPT, "bucket_size_mb": 0.05}
DROPS = {"model": {"name": "gpt-nano", "dropout": 0.1}}
CASES |= {
    "gpt, zero1": {**NANO, "mode": "zero1"},
    "gpt, zero1, clipped, fp16": {**NANO, "mode": "zero1", "clip_norm": 0.1, "precision": "fp16"},
    "gpt, zero2, pure_bf16": {**NANO, "mode": "zero2", "precision": "pure_bf16"},
    "gpt, zero2, accumulated, sent as bf16": {
        **NANO,
        "mode": "zero2",
        "grad_accumulation": 2,
        "accumulate": "sharded",
        "communication_dtype": "bf16",
    },
    "vgg, zero1": {**VGG, "mode": "zero1"},
    "gpt, bucketed, dropout": {**GPT, **DROPS, "mode": "bucketed", "grad_accumulation": 2},
    "gpt, zero1, dropout": {**NANO, **DROPS, "mode": "zero1", "precision": "bf16"},
    "gpt, bucketed, exact": {**NANO, "mode": "bucketed", "exact": True},
    "gpt, allreduce, exact, dropout": {**GPT, **DROPS, "mode": "allreduce", "exact": True},
    "gpt, zero1, exact": {**NANO, "mode": "zero1", "exact": True, "clip_norm": 0.1},
    "gpt, zero2, exact": {**NANO, "mode": "zero2", "exact": True},
    "gpt, tensor": {**GPT, "mode": "tensor", "clip_norm": 0.1},
    "gpt, tensor, sequences, bf16": {**GPT, "mode": "tensor", "sequence_parallel": True, "precision": "bf16"},
}
ALONE = {
    "gpt, single": {**GPT, "mode": "single"},
    "vgg, single, adamw": {**VGG, "mode": "single", "optimizer": GPT["optimizer"]},
}


def engine_of(case: dict[str, Any], world: World, *, cuda_graph: bool | str) -> Engine:
    settings = TrainSettings.model_validate({**case, "cuda_graph": cuda_graph, "batch_size": 16})
    numerics = numerics_of(settings, world.device)
    model = numerics.place(build_model(settings.model, vocabulary=10, seed=1))
    return build_engine(settings, model, world, clock_for(world.device), numerics, sample=(16,))


def shards_of(case: dict[str, Any], world: World, step: int, dtype: torch.dtype) -> list[ShardInput]:
    """Draw the shards of a step: with `exact`, of two virtual ranks."""
    each = 2 if case.get("exact") else 1
    return [work_of(case, world, step, dtype, number=world.data_rank * each + place) for place in range(each)]


def work_of(
    case: dict[str, Any], world: World, step: int, dtype: torch.dtype, *, number: int | None = None
) -> ShardInput:
    """Draw the shard of a step: on uneven steps a sample less."""
    number = world.data_rank if number is None else number
    generator = torch.Generator().manual_seed(100 * step + number)
    micro_batches = []
    parts = int(case.get("grad_accumulation", 1))
    for _ in range(parts):
        samples = 3 if step in UNEVEN else 4
        if "vgg" not in case["model"]:
            drawn = torch.randint(10, (samples, 17), generator=generator).to(world.device)
            inputs, targets = drawn[:, :-1], drawn[:, 1:]
        else:
            inputs = torch.randn(samples, 3, 32, 32, generator=generator).to(world.device, dtype)
            targets = torch.randint(10, (samples,), generator=generator).to(world.device)
        micro_batches.append(MicroInput(inputs, targets, samples, 1.0 / parts))
    return ShardInput(number, tuple(micro_batches))


def trained(case: dict[str, Any], world: World, *, cuda_graph: bool) -> tuple[Engine, list[float]]:
    engine = engine_of(case, world, cuda_graph=cuda_graph)
    dtype = torch.bfloat16 if case.get("precision") == "pure_bf16" else torch.float32
    losses = []
    for step in range(STEPS):
        set_learning_rate(engine.optimizer, 0.01 / (step + 1))
        losses += [float(loss) for loss in engine.train_step(step, shards_of(case, world, step, dtype))]
    return engine, losses


def differences(name: str, case: dict[str, Any], world: World) -> list[str]:
    """Train with and without; name what has not the same bits."""
    if case["mode"] == "tensor":
        world = replace(world, tensor=2)
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    eager, wanted = trained(case, world, cuda_graph=False)
    graphed, found = trained(case, world, cuda_graph=True)
    problems = [] if found == wanted else [f"losses {found} where {wanted} were wanted"]
    if graphed.graphed is None or len(graphed.graphed.recorded) != 2:
        problems.append("both forms of steps should have been recorded")
    left, right = eager.module.state_dict(), graphed.module.state_dict()  # of shards: waits for gathers
    problems += [key for key in left if not torch.equal(left[key], right[key])]
    held = zip(eager.held_state(), graphed.held_state(), strict=True)
    problems += [one.piece.name for one, other in held if not torch.equal(one.tensor, other.tensor)]
    return [f"{name}: {problem}" for problem in problems]


def all_differences(world: World, folder: str, names: list[str]) -> list[str]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    with over("nccl", world, folder) as on_gpu:
        alone = World(0, 1, None, on_gpu.device)
        cases = {**CASES, **ALONE}
        return [each for name in names for each in differences(name, cases[name], alone if name in ALONE else on_gpu)]


PARTS = [list(CASES)[start : start + 6] for start in range(0, len(CASES), 6)]


@pytest.mark.parametrize(("world_size", "names"), [*((2, part) for part in PARTS), (1, list(ALONE))])
def test_recorded_steps_train_as_eager_ones_bit_for_bit(on_ranks, tmp_path: Path, world_size, names):
    found = on_ranks(world_size, all_differences, deadline_s=55.0, group=False, folder=str(tmp_path), names=names)
    assert found == [[]] * world_size


ONE_STAGE = {"data": 2, "pipe": 1, "schedule": "1f1b", "microbatches": 3}
PIPELINES: dict[str, dict[str, Any]] = {
    "1f1b": {"mode": "1f1b", "microbatches": 3},
    "zb1p": {"mode": "zb1p", "microbatches": 3},
    "1f1b, dropout": {**DROPS, "mode": "1f1b", "microbatches": 3},
    "zb1p, dropout": {**DROPS, "mode": "zb1p", "microbatches": 3},
    # Two pipelines of one rank each: the smallest ones whose gradients are averaged.
    "averaged": {"parallel": ONE_STAGE},
    "averaged, flat": {"parallel": {**ONE_STAGE, "sync": "flat"}},
}


SQUARE = {**ONE_STAGE, "pipe": 2}
PIPELINES_OF_FOUR = {
    "2 x 2": {"parallel": SQUARE},
    "2 x 2, zb1p, dropout": {**DROPS, "parallel": {**SQUARE, "schedule": "zb1p"}},
}


def pipelines(world: World, folder: str, names: list[str]) -> list[str]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    with over("nccl", world, folder) as on_gpu:
        return [each for name in names for each in pipeline_differences(name, on_gpu)]


def pipeline_differences(name: str, world: World) -> list[str]:
    """Train a pipeline with and without recorded forwards and backwards; name what is not the same."""
    case = {**GPT, "clip_norm": 0.1, "precision": "bf16", **{**PIPELINES, **PIPELINES_OF_FOUR}[name]}
    world = replace(world, pipe=2 if "mode" in case or name in PIPELINES_OF_FOUR else 1)
    engines = [engine_of(case, world, cuda_graph=cuda_graph) for cuda_graph in (False, True)]
    losses: list[list[float]] = [[], []]
    for step in range(5):
        drawn = torch.Generator().manual_seed(10 * step + world.data_rank)
        tokens = torch.randint(10, (2, 8, 16), generator=drawn).to(world.device)
        work = ShardInput(world.data_rank, (MicroInput(tokens[0], tokens[1], 8, 1.0),))
        for engine, found in zip(engines, losses, strict=True):
            found += [float(loss) for loss in engine.train_step(step, [work])]
    problems = [] if losses[0] == losses[1] else [f"losses {losses[1]} where {losses[0]} were wanted"]
    eager, recorded = engines
    assert recorded.stages is not None
    graphs = recorded.stages.pipeline.graphs
    if graphs is None or not any(graphs._slots.values()):
        problems.append("forwards and backwards should have been recorded")
    wanted = eager.module.state_dict()
    state = recorded.module.state_dict()
    problems += [name for name, each in wanted.items() if not torch.equal(each, state[name])]
    return [f"{name}: {problem}" for problem in problems]


def test_recorded_forwards_and_backwards_of_pipelines_train_as_eager_ones(on_ranks, tmp_path: Path):
    found = on_ranks(2, pipelines, deadline_s=55.0, group=False, folder=str(tmp_path), names=list(PIPELINES))
    assert found == [[], []]


@pytest.mark.gpu(4)
def test_recorded_pipelines_whose_gradients_are_averaged_train_as_eager_ones(on_ranks, tmp_path: Path):
    names = list(PIPELINES_OF_FOUR)
    assert on_ranks(4, pipelines, deadline_s=55.0, group=False, folder=str(tmp_path), names=names) == [[]] * 4


FAILURES = (
    "no room on rank 1",
    "the host waits in a forward",
    "the host waits in a backward of rank 1",
    "evaluation on rank 1",
)


def fall_back(world: World, folder: str, mode: str) -> list[str]:
    """Train with `auto` where a recording fails; name what differs from eager training."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    with over("nccl", world, folder) as on_gpu:
        wanted = trained({**NANO, "mode": mode}, on_gpu, cuda_graph=False)[1]
        return [each for failure in FAILURES for each in fallen_back(mode, failure, on_gpu, wanted)]


def evaluated(engine: Engine, *, fails: bool) -> None:
    """Evaluate; with `fails`, the memory does not suffice beside the graphs."""

    def work() -> None:
        assert engine.graphed is not None
        if fails and engine.graphed.recorded:
            raise torch.OutOfMemoryError("no memory")

    engine.with_room(work)
    engine.agree_on_graphs()


def fallen_back(mode: str, failure: str, world: World, wanted: list[float]) -> list[str]:
    case = {**NANO, "mode": mode}
    engine = engine_of(case, world, cuda_graph="auto")
    own = graph.room_for
    if "room" in failure and world.rank == 1:
        graph.room_for = lambda *_: "little memory"  # type: ignore[assignment]
    first = next(engine.module.parameters())

    def wait(*_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            float(first.detach().sum())

    if "forward" in failure:
        next(engine.module.children()).register_forward_pre_hook(wait)
    elif "backward" in failure and world.rank == 1:
        first.register_hook(lambda gradient: wait())
    losses = []
    for step in range(STEPS):
        set_learning_rate(engine.optimizer, 0.01 / (step + 1))
        losses += [float(loss) for loss in engine.train_step(step, shards_of(case, world, step, torch.float32))]
        if "evaluation" in failure and step == EAGER_STEPS + 1:
            evaluated(engine, fails=world.rank == 1)
    graph.room_for = own  # type: ignore[assignment]
    said = engine.notice
    problems = [] if losses == wanted else [f"losses {losses} where {wanted} were wanted"]
    problems += [] if said.startswith("cuda_graph: auto: steps run eagerly: ") else [f"notice {said!r}"]
    assert engine.graphed is not None
    problems += ["recorded all the same"] if engine.graphed.recorded or engine.graph_bytes else []
    return [f"{mode}, {failure}: {problem}" for problem in problems]


@pytest.mark.parametrize("mode", ["bucketed", "zero1", "zero2"])
def test_all_ranks_train_eagerly_when_one_cannot_record(on_ranks, tmp_path: Path, mode):
    found = on_ranks(2, fall_back, deadline_s=55.0, group=False, folder=str(tmp_path), mode=mode)
    assert found == [[], []]


def silent(world: World, folder: str) -> list[float]:
    with over("nccl", world, folder) as on_gpu:
        return silent_losses(on_gpu)  # a group is destroyed only when no graph has recorded it any more


def silent_losses(world: World) -> list[float]:
    case = CASES["gpt, bucketed"]
    engine = engine_of(case, world, cuda_graph=True)
    work = [work_of(case, world, 0, torch.float32) for _ in range(STEPS)]
    losses = [engine.train_step(0, [work[0]]) for _ in range(EAGER_STEPS + 1)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(EAGER_STEPS + 1, STEPS):
            set_learning_rate(engine.optimizer, 0.01)
            losses.append(engine.train_step(step, [work[step]]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(loss[0]) for loss in losses]


def test_no_replayed_step_makes_the_host_wait(on_ranks, tmp_path: Path):
    losses = on_ranks(2, silent, deadline_s=55.0, group=False, folder=str(tmp_path))
    assert all(each[-1] < each[0] for each in losses)  # it is one batch again and again, and is learned


JOB = """
nodes: 1
ranks_per_node: 2
train:
  model: vgg11
  data: digits
  mode: bucketed
  batch_size: 200
  epochs: 2
  log_every: 4
  deterministic: true
  cuda_graph: {graph}
  device: cuda
  optimizer: {{name: adamw, lr: 0.001}}
"""


@pytest.mark.gpu(2)
def test_a_job_with_graphs_has_the_losses_of_one_without_and_says_what_was_replayed(tmp_path: Path) -> None:
    rows = {}
    for recorded in ("true", "false"):
        (tmp_path / recorded).mkdir()
        live = LiveRun(tmp_path / recorded, JOB.format(graph=recorded))
        assert live.end() == 0, live.err
        rows[recorded] = [row for row in read_lines(live.run.metrics) if "evaluation" not in row]
    assert [row["loss"] for row in rows["true"]] == [row["loss"] for row in rows["false"]]
    replayed = [row["step"] for row in rows["true"] if row.get("replay_s", 0.0) > 0.0]
    full = [row["step"] for row in rows["true"] if row["step"] % (len(rows["true"]) // 2)]  # an epoch's last is smaller
    assert replayed == full[EAGER_STEPS:]
    assert not any("replay_s" in row for row in rows["false"])


def test_a_training_with_graphs_goes_on_bit_by_bit_from_a_checkpoint(tmp_path: Path) -> None:
    settings = {**GPT, "mode": "single", "device": "cuda", "deterministic": True, "steps": 16, "cuda_graph": True}
    settings |= {"batch_size": 8, "log_every": 1, "evaluate": False}
    parts = tmp_path / "parts"
    assert attempt_apart(parts, settings, stop_at=9)[0] == 75
    code, resumed = attempt_apart(parts, settings, number=1)
    assert (code, attempt_apart(tmp_path / "whole", settings)) == (0, [0, resumed])
