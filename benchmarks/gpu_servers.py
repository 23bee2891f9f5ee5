"""Time a push to and a pull from parameter servers between GPUs of one host: NCCL against pinned memory and gloo.

    torchrun --nproc-per-node 2 benchmarks/gpu_servers.py

Every rank is a worker and a server. All of them step at the same time, in the order A B B A, with plain SGD. The time
of a step is the median over the steps of all blocks of a side, on rank 0.
"""

import argparse
import statistics
import time
from unittest.mock import patch

import gpu_stage
import torch
import torch.distributed as dist
from ranks import say
from torch import nn

from muster.ddp.asynchronous import links, optimizer

STEPS = 10
SIDES = {"nccl": True, "gloo": False}


def seconds(stage: gpu_stage.Stage, group: dist.ProcessGroup, side: str, elements: int) -> list[float]:
    """Return the seconds of some steps of one side."""
    found = []
    with (
        patch.object(links, "uses_nccl", lambda _: SIDES[side]),
        patch.object(optimizer, "uses_nccl", lambda _: SIDES[side]),
    ):
        model = nn.Linear(elements // 1024, 1024, bias=False, device=stage.device)
        served = optimizer.AsynchronousOptimizer(model.parameters(), torch.optim.SGD, group, lr=0.1)
        model.weight.grad = torch.ones_like(model.weight)
        for _ in range(STEPS + 2):
            stage.synchronize()
            stage.all(0.0)
            began = time.perf_counter()
            served.step()
            stage.synchronize()
            found.append(time.perf_counter() - began)
        served.finish()
    return found[2:]


def main() -> None:
    """Measure, and print one line per side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=124_000_000)
    elements = parser.parse_args().elements
    stage = gpu_stage.Stage(smoke=False)
    group = dist.new_group(backend="gloo")
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in ("nccl", "gloo", "gloo", "nccl"):
        times[side] += seconds(stage, group, side, elements)
    for side, each in times.items():
        if stage.rank == 0:
            say("servers", side=side, ranks=stage.ranks, elements=elements, step_s=statistics.median(each))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
