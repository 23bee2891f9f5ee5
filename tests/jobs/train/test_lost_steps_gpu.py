"""Lost steps on CUDA devices: left out on the device, read without waiting, recorded steps too."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muster.jobs.models.shapes import VGG_SHAPES
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import move
from muster.jobs.train.loop import train
from muster.jobs.train.metrics import Files
from muster.jobs.train.soundness import NotFiniteError, Soundness
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.world.world import World
from support.gpus import over
from support.resuming import TINY_VGG

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

LOST = 7  # a recorded step replays by then
VGG = {"model": "vgg-tiny", "data": "digits", "batch_size": 16, "log_every": 100, "evaluate": False}
ADAMW = {"name": "adamw", "lr": 0.01}
CASES: list[dict[str, Any]] = [
    {"mode": "bucketed"},
    {"mode": "bucketed", "cuda_graph": True, "optimizer": ADAMW},
    {"mode": "flat", "precision": "pure_bf16", "clip_norm": 1.0},
    {"mode": "zero2", "optimizer": ADAMW},
    {"mode": "zero3"},
    {"mode": "fsdp", "optimizer": ADAMW},
    {"mode": "1f1b"},
]


def built(world: World, settings: dict[str, Any], steps: int = 12) -> Trainer:
    VGG_SHAPES["vgg-tiny"] = TINY_VGG
    job = TrainSettings.model_validate({**VGG, "steps": steps, **settings})
    return build_trainer(job, open_data(job), world)


def spoilt(step: int, shards: Any, world: World) -> Any:
    """Make the last rank's images of one step no numbers; of a pipeline all ranks read them."""
    if step + 1 == LOST and (world.rank == world.size - 1 or world.pipe > 1):
        for shard in shards:
            for micro in shard.micro_batches:
                micro.inputs.fill_(torch.nan)
    return shards


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    trained = trainer.engine.model.whole.trained
    return {name: each.clone() for name, each in trainer.engine.model.full_state().items() if name in trained}


def left_out(world: World, folder: str) -> list[str]:
    """Return what the lost step changed, and what the steps around it did not."""
    problems = []
    with over("nccl", world, folder) as on_gpu:
        for case in CASES:
            trainer = built(on_gpu, case)
            soundness = Soundness(trainer.engine.scaler.first_lost, 100)
            seen, steps = [parameters(trainer)], trainer.own_steps()
            for step in range(LOST + 1):
                shards = move(steps[step], on_gpu.device, trainer.dtype).shards
                trainer.engine.train_step(step, spoilt(step, shards, trainer.world))
                torch.cuda.set_sync_debug_mode("error")
                soundness.is_lost()
                torch.cuda.set_sync_debug_mode("default")
                seen.append(parameters(trainer))
            torch.cuda.synchronize()
            same = [all(torch.equal(a, b[name]) for name, a in c.items()) for b, c in itertools.pairwise(seen)]
            if same[:LOST] != [False] * (LOST - 1) + [True] or not soundness.is_lost():
                problems.append(f"{case}: {same}, {int(trainer.engine.scaler.first_lost)}")
            try:
                soundness.end()
            except NotFiniteError as error:
                problems += [] if f"at step {100 + LOST}:" in str(error) else [str(error)]
    return problems


def test_the_update_of_a_lost_step_is_left_out_in_every_mode(on_ranks, tmp_path: Path):
    assert on_ranks(2, left_out, deadline_s=110.0, group=False, folder=str(tmp_path)) == [[]] * 2


def ended(world: World, folder: str, cuda_graph: bool) -> list[Any]:
    """Train until it ends, whose images are no numbers in one step; and until just before."""
    torch.cuda.set_device(0)
    alone, found, trainer = World(0, 1, None, torch.device("cuda", 0)), [], None
    for steps in (40, LOST - 1):
        trainer = built(alone, {"mode": "single", "cuda_graph": cuda_graph}, steps)
        of_step, begun = trainer.engine.train_step, [0]

        def counted(step: int, shards: Any, of_step: Any = of_step, begun: list[int] = begun) -> list[Tensor]:
            begun[0] = step + 1
            losses: list[Tensor] = of_step(step, spoilt(step, shards, alone))
            return losses

        trainer.engine.train_step = counted  # type: ignore[method-assign]
        files, said = Files(Path(folder) / f"{steps}.jsonl", None), ""
        try:
            train(trainer, files, Reporter({}), attempt=0)
        except NotFiniteError as error:
            said = str(error).partition(":")[0]
        found.append([said, begun[0]])
    return found


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_training_on_a_gpu_ends_and_names_the_step(on_ranks, tmp_path: Path, cuda_graph):
    ((lost, clean),) = on_ranks(1, ended, deadline_s=55.0, group=False, folder=str(tmp_path), cuda_graph=cuda_graph)
    assert clean == ["", LOST - 1]
    assert lost[0] == f"loss or gradients are not finite at step {LOST}"
    assert LOST <= lost[1] < 40  # steps that the host had begun
