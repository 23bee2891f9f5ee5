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
pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

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
ALONE = {
    "gpt, single": {**GPT, "mode": "single"},
    "vgg, single, adamw": {**VGG, "mode": "single", "optimizer": GPT["optimizer"]},
}


def engine_of(case: dict[str, Any], world: World, *, cuda_graph: bool) -> Engine:
    settings = TrainSettings.model_validate({**case, "cuda_graph": cuda_graph, "batch_size": 16})
    numerics = numerics_of(settings, world.device)
    model = numerics.place(build_model(settings.model, vocabulary=10, seed=1))
    return build_engine(settings, model, world, clock_for(world.device), numerics)


def work_of(case: dict[str, Any], world: World, step: int, dtype: torch.dtype) -> ShardInput:
    """Draw the shard of a step: on uneven steps a sample less."""
    generator = torch.Generator().manual_seed(100 * step + world.rank)
    micro_batches = []
    parts = int(case.get("grad_accumulation", 1))
    for _ in range(parts):
        samples = 3 if step in UNEVEN else 4
        if case["model"] == "gpt-nano":
            drawn = torch.randint(10, (samples, 17), generator=generator).to(world.device)
            inputs, targets = drawn[:, :-1], drawn[:, 1:]
        else:
            inputs = torch.randn(samples, 3, 32, 32, generator=generator).to(world.device, dtype)
            targets = torch.randint(10, (samples,), generator=generator).to(world.device)
        micro_batches.append(MicroInput(inputs, targets, samples, 1.0 / parts))
    return ShardInput(world.rank, tuple(micro_batches))


def trained(case: dict[str, Any], world: World, *, cuda_graph: bool) -> tuple[Engine, list[float]]:
    engine = engine_of(case, world, cuda_graph=cuda_graph)
    dtype = torch.bfloat16 if case.get("precision") == "pure_bf16" else torch.float32
    losses = []
    for step in range(STEPS):
        set_learning_rate(engine.optimizer, 0.01 / (step + 1))
        losses += [float(loss) for loss in engine.train_step(step, [work_of(case, world, step, dtype)])]
    return engine, losses


def differences(name: str, case: dict[str, Any], world: World) -> list[str]:
    """Train with and without; name what has not the same bits."""
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    eager, wanted = trained(case, world, cuda_graph=False)
    graphed, found = trained(case, world, cuda_graph=True)
    problems = [] if found == wanted else [f"losses {found} where {wanted} were wanted"]
    if graphed.graphed is None or len(graphed.graphed.recorded) != 2:
        problems.append("both forms of steps should have been recorded")
    left, right = eager.module.state_dict(), graphed.module.state_dict()
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


@pytest.mark.parametrize(("world_size", "names"), [(2, list(CASES)), (1, list(ALONE))])
def test_recorded_steps_train_as_eager_ones_bit_for_bit(on_ranks, tmp_path: Path, world_size, names):
    found = on_ranks(world_size, all_differences, deadline_s=55.0, group=False, folder=str(tmp_path), names=names)
    assert found == [[]] * world_size


def pipelines(world: World, folder: str) -> list[str]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    with over("nccl", world, folder) as on_gpu:
        return [each for mode in ("1f1b", "zb1p") for each in pipeline_differences(mode, replace(on_gpu, pipe=2))]


def pipeline_differences(mode: str, world: World) -> list[str]:
    """Train a pipeline with and without recorded forwards and backwards; name what is not the same."""
    case = {**GPT, "mode": mode, "microbatches": 3, "clip_norm": 0.1, "precision": "bf16"}
    engines = [engine_of(case, world, cuda_graph=cuda_graph) for cuda_graph in (False, True)]
    losses: list[list[float]] = [[], []]
    for step in range(5):
        tokens = torch.randint(10, (2, 8, 16), generator=torch.Generator().manual_seed(step)).to(world.device)
        work = ShardInput(0, (MicroInput(tokens[0], tokens[1], 8, 1.0),))
        for engine, found in zip(engines, losses, strict=True):
            found += [float(loss) for loss in engine.train_step(step, [work])]
    problems = [] if losses[0] == losses[1] else [f"losses {losses[1]} where {losses[0]} were wanted"]
    eager, recorded = engines
    assert recorded.stages is not None
    graphs = recorded.stages.pipeline._graphs
    if graphs is None or not any(graphs._slots.values()):
        problems.append("forwards and backwards should have been recorded")
    wanted = eager.module.state_dict()
    state = recorded.module.state_dict()
    problems += [name for name, each in wanted.items() if not torch.equal(each, state[name])]
    return [f"{mode}: {problem}" for problem in problems]


def test_recorded_forwards_and_backwards_of_pipelines_train_as_eager_ones(on_ranks, tmp_path: Path):
    assert on_ranks(2, pipelines, deadline_s=55.0, group=False, folder=str(tmp_path)) == [[], []]


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
    for graph in ("true", "false"):
        (tmp_path / graph).mkdir()
        live = LiveRun(tmp_path / graph, JOB.format(graph=graph))
        assert live.end() == 0, live.err
        rows[graph] = [row for row in read_lines(live.run.metrics) if "evaluation" not in row]
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
