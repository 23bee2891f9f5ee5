"""Real training steps, on all processes of the measurement.

They show the time of the engine and of its messages besides the passes: on CPUs as CPU time of all threads, on GPUs as
the host's time until a step is enqueued.

    GPU idle │ host: step is enqueued │          host_s
    back to back: steps begin before the GPU has finished the last one        seconds
"""

import gc
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import replaced
from muster.jobs.spec.modes import PIPELINES
from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import move
from muster.jobs.train.timing.device import synchronize
from muster.jobs.train.timing.passes import GPUS, TimedModel
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.world.world import World

if TYPE_CHECKING:
    from muster.jobs.spec.train import TrainSettings

WARM: Final = {GPUS: 6, "cpu": 2}  # steps: on GPUs also those before the passes are recorded
LEAST, MOST, ROUND_S = 2, 8, 1.0  # timed steps
MODES: Final = ("flat", "gpipe", "1f1b", "zb1p")
FEW, MANY = 1, 4  # micro-batches for each rank


def rows_of(subject: TimedModel, samples: int) -> list[tuple[str, int, int]]:
    """List the steps to time, as (mode, micro-batches per rank, samples per micro-batch).

    On GPUs they differ in the number of actions, on CPUs also in the mode and in the size of an action.
    """
    if subject.device.type == GPUS:
        return [(MODES[0], FEW, samples), ("zb1p", FEW, 1), ("zb1p", MANY, 1)]
    model = subject.settings.model
    modes = MODES if model.is_vgg or model.make is not None else (*MODES, "terapipe")  # only GPTs can be sliced
    rows = [(mode, FEW, size) for mode in modes for size in sorted({1, samples})]
    return [*rows, ("gpipe", MANY, 1), ("zero1", FEW, samples)]


def steps_of(
    settings: "TrainSettings", device: torch.device, rows: Sequence[tuple[str, int, int]]
) -> list[dict[str, Any]]:
    """Time steps with a stage, or all of the model, on every rank; leave out those that the job's other settings or
    its model do not allow. A collective.
    """
    found = []
    for mode, per_rank, samples in rows:
        microbatches = per_rank * dist.get_world_size()
        changes = {"mode": mode, "parallel": None, "batch_size": samples * microbatches, "epochs": None, "steps": 1000}
        changes["microbatches"] = microbatches if mode in PIPELINES else None
        gc.collect()  # the trainer before
        if device.type == GPUS:
            torch.cuda.empty_cache()
        try:
            timed = _timed(_trainer(replaced(settings, **changes), device))
        except (RefusedError, ValueError, RuntimeError):  # the same on all ranks
            continue
        found.append({"mode": mode, "microbatches": microbatches, "samples": samples, **timed})
    gc.collect()
    return found


def _trainer(settings: "TrainSettings", device: torch.device) -> Trainer:
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, device)
    return build_trainer(settings, open_data(settings), world)


def _timed(trainer: Trainer) -> dict[str, float]:
    """Return the seconds of a step, and the host's, on the slowest rank; and the mean CPU seconds of a rank."""
    device, inputs, done = trainer.world.device, trainer.own_steps(), 0

    def run() -> float:
        nonlocal done
        began = time.perf_counter()
        trainer.clock.start()
        trainer.engine.train_step(done, move(inputs[done], device, trainer.dtype).shards)
        trainer.clock.stop()
        done += 1
        return time.perf_counter() - began

    def every(*own: float) -> list[tuple[float, ...]]:
        mine = torch.tensor(own, dtype=torch.float64, device=device)
        told = [torch.empty_like(mine) for _ in range(trainer.world.size)]
        dist.all_gather(told, mine)
        return list(zip(*(each.tolist() for each in told), strict=True))

    warm = [run() for _ in range(WARM[device.type])]
    synchronize(device)
    count = min(max(int(ROUND_S / max(every(warm[-1])[0])), LEAST), MOST)
    began, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        run()
    synchronize(device)
    step_s, cpu_s = (time.perf_counter() - began) / count, (time.process_time() - used) / count
    host = [0.0]
    for _ in range(count if device.type == GPUS else 0):
        synchronize(device)
        host.append(run())
    synchronize(device)
    seconds, hosts, cpus = every(step_s, median(host[1:] or host), cpu_s)
    trainer.engine.cut()
    return {"seconds": max(seconds), "host_s": max(hosts), "cpu_s": sum(cpus) / len(cpus)}
