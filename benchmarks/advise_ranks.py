"""The rank side of `advise.py` on GPUs: builds the trainer of each split, as `muster run` does, and times its steps.

All splits of a case run in the same processes, because starting processes and NCCL takes longer than the steps. Rank 0
prints a line of JSON for every split, with the seconds of a step in each block on the slowest rank.
"""

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_stage import Stage
from ranks import say

WARM_STEPS = 8  # three eager ones of each form, the recording, and the first replays
BLOCKS, BLOCK_STEPS = 5, 6


def rank_main(sections: list[dict[str, Any]], *, smoke: bool) -> None:
    """Be one rank; `sections` are the `train:` sections of the splits."""
    stage = Stage(smoke=smoke, limit_s=60.0)
    torch.set_num_threads(1)  # reading data with a thread for every core of the host takes 150 ms on four ranks
    for index, section in enumerate(sections):
        why, steps = "", list[float]()
        try:
            steps = times_of(stage, section)
        except (RuntimeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        gc.collect()
        if not smoke:
            torch.cuda.empty_cache()
        failed = max(stage.all(float(bool(why))))
        say("split", index=index, steps=[] if failed else steps, why=why)
    dist.destroy_process_group()


def times_of(stage: Stage, section: dict[str, Any]) -> list[float]:
    """Return the seconds of a step in every block."""
    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.train.data import open_data
    from muster.jobs.train.data.loading import move
    from muster.jobs.train.trainer import build_trainer
    from muster.jobs.world.world import World

    settings = TrainSettings.model_validate(section)
    world = World(stage.rank, stage.ranks, dist.group.WORLD, stage.device)
    trainer = build_trainer(settings, open_data(settings), world)
    inputs = trainer.own_steps()
    done = 0

    def run(count: int) -> None:
        nonlocal done
        for _ in range(count):
            trainer.clock.start()
            trainer.engine.train_step(done, move(inputs[done], stage.device, trainer.dtype).shards)
            trainer.clock.stop()
            done += 1

    run(WARM_STEPS)
    steps = []
    for _ in range(BLOCKS):
        stage.synchronize()
        stage.all(0.0)
        began_s = time.perf_counter()
        run(BLOCK_STEPS)
        stage.synchronize()
        steps.append(max(stage.all(time.perf_counter() - began_s)) / BLOCK_STEPS)
        trainer.clock.take()
    return steps
