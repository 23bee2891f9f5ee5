"""Why processes replaced threads: a step of replicas in one process (`ddp/replicas.py`) against DDP's on as many ranks.

    threads     Replicas on rank 0, a thread for each part of the batch; the other ranks sleep in a barrier
    processes   PyTorch's DistributedDataParallel, each rank with one part of the batch
    alone       one part of the batch on rank 0: with perfect scaling, the others take as long

The model `gpt-5ms` has small operations, so its time is mostly Python's, which only one thread of a process runs at a
time. VGG-11 has large ones. Each device or rank computes with one thread. Sides take turns.

    .venv/bin/python benchmarks/data_parallel.py [--replicas 2,4,8] [--repeats 9] [--json FILE] [--quick]
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from ddp_models import TASKS, Task, loss_of
from harness import Options, by_clock, compare, finish, numbers, turns
from ranks import on_ranks, timed
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import Replicas
from muster.jobs.models.shapes import GptShape

GPT_5MS = Task(GptShape("gpt-5ms", 64, 256, 2, 4, context=32), 2)
GOALS = {"gpt-5ms": 1.0, "vgg11": 1.2}
MODELS: dict[str, tuple[Task, int]] = {"gpt-5ms": (GPT_5MS, 40), "vgg11": (TASKS["vgg11"], 3)}  # and steps of a block


def measure(model: str, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Time blocks of steps of each side: CPU seconds of all ranks, and wall seconds."""
    torch.set_num_threads(1)
    task, steps = MODELS[model]
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [next(task.batches(each)) for each in range(size)]
    alone, processes = task.build(), DistributedDataParallel(task.build(), gradient_as_bucket_view=True)
    replicas = Replicas(task.build(), [torch.device("cpu")] * size)

    def in_threads() -> None:
        replicas.replicate()
        replicas.run(lambda index, module: loss_of(module, *parts[index]).backward())
        replicas.reduce()

    def block(module: torch.nn.Module, step: Any, *, by_rank_0: bool) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)

        def train() -> None:
            for _ in range(0 if by_rank_0 and rank else steps):
                optimizer.zero_grad()
                step()
                optimizer.step()

        return lambda: timed(train)

    sides = {
        "threads": block(replicas.modules[0], in_threads, by_rank_0=True),
        "processes": block(processes, lambda: loss_of(processes, *parts[rank]).backward(), by_rank_0=False),
        "alone": block(alone, lambda: loss_of(alone, *parts[0]).backward(), by_rank_0=True),
    }
    return turns(sides, repeats, warm_up=1)


def main() -> int:
    """Measure both models with each number of replicas."""
    parser = Options(__doc__, repeats=9, quick={"repeats": 2, "replicas": [2]})
    parser.add_argument("--replicas", type=numbers, default=[2], help="numbers of threads and of ranks, with commas")
    args = parser.parse_args()
    rows = []
    for model, (_, steps) in MODELS.items():
        for replicas in args.replicas:
            times = on_ranks(measure, replicas, model=model, repeats=args.repeats)
            wall = by_clock(times["processes"], times["threads"], steps)["wall"]
            title = f"{model}: a step of {replicas} processes (ours) against {replicas} threads"
            row = compare(title, wall["ours"], wall["theirs"], reach=GOALS[model])
            for side in ("threads", "processes"):
                row[side] = replicas * by_clock(times["alone"], times[side], steps)["wall"]["ratio"]
                print(f"  {side}: {row[side]:.2f} times the samples/s of one replica")
            rows.append(row)
    return finish(args, "data_parallel", rows)


if __name__ == "__main__":
    sys.exit(main())
