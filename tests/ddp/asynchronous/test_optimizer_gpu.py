"""Parameter servers of CUDA tensors: one worker equals one process, and two see each other's updates."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.ddp.asynchronous.optimizer import AsynchronousOptimizer
from muster.jobs.world.world import World
from support.gpus import over

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def stepped(world: World, folder: str) -> dict[str, Any]:
    """Step in turns; compare with one process that makes all steps, each with a gradient divided by the workers."""
    with over("nccl", world, folder) as on_gpu:
        models = []
        for _ in range(2):
            torch.manual_seed(1)
            models.append(nn.Linear(300, 7).to(on_gpu.device))
        ours, alone = models
        group = dist.new_group(backend="gloo")
        served = AsynchronousOptimizer(ours.parameters(), torch.optim.AdamW, group, lr=0.1, fused=True)
        reference = torch.optim.AdamW(alone.parameters(), lr=0.1, fused=True)
        staleness = []
        for step in range(6):
            inputs = torch.randn(4, 300, generator=torch.Generator().manual_seed(step)).to(on_gpu.device)
            alone.zero_grad()
            (alone(inputs).sum() / on_gpu.size).backward()
            reference.step()
            if step % on_gpu.size == on_gpu.rank:
                ours.zero_grad()
                ours(inputs).sum().backward()  # linear: the same gradient for any parameters
                served.step()
                staleness += served.staleness
            dist.barrier(group)
        served.pull()
        same = all(torch.equal(mine, yours) for mine, yours in zip(ours.parameters(), alone.parameters(), strict=True))
        served.finish()
        return {"same": same, "staleness": sorted(set(staleness))}


@pytest.mark.parametrize("world_size", [1, 2])
def test_servers_of_cuda_tensors_compute_what_one_process_does(on_ranks: Any, tmp_path: Any, world_size: int) -> None:
    for found in on_ranks(world_size, stepped, group=False, folder=str(tmp_path)):
        assert found["same"]
        assert found["staleness"] in ([0], [0, 1], [1])
