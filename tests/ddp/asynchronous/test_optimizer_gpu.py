"""Parameter servers of CUDA tensors: one worker equals one process, and two see each other's updates."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.ddp.asynchronous.links import TAG
from muster.ddp.asynchronous.optimizer import AsynchronousOptimizer
from muster.ddp.asynchronous.server import PUSH
from muster.jobs.world.world import World
from support.gpus import over

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def stepped(world: World, folder: str, backend: str) -> dict[str, Any]:
    """Step in turns; compare with one process that makes all steps, each with a gradient divided by the workers."""
    with over(backend, world, folder) as on_gpu:
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


@pytest.mark.parametrize(("world_size", "backend"), [(1, "nccl"), (2, "nccl"), (2, "gloo")])
def test_servers_of_cuda_tensors_compute_what_one_process_does(
    on_ranks: Any, tmp_path: Any, world_size: int, backend: str
) -> None:
    given = {"folder": str(tmp_path), "backend": backend}
    for found in on_ranks(world_size, stepped, group=False, **given):
        assert found["same"]
        assert found["staleness"] in ([0], [0, 1], [1])


def crowded(world: World, folder: str) -> list[bool]:
    """Step at the same time as the other rank, with an optimizer after another on the same group."""
    with over("nccl", world, folder) as on_gpu:
        group = dist.new_group(backend="gloo")
        found = []
        for servers in (2, 1):
            model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(10))).to(on_gpu.device)
            served = AsynchronousOptimizer(model.parameters(), torch.optim.AdamW, group, lr=1e-3, servers=servers)
            for _ in range(50):
                served.zero_grad()
                model(torch.randn(8, 1000, device=on_gpu.device)).square().mean().backward()
                served.step()
            dist.barrier(group)
            served.pull()
            mine = torch.cat([each.detach().flatten() for each in model.parameters()])
            of_first = mine.clone()
            dist.broadcast(of_first, 0)
            found.append(torch.equal(mine, of_first))
            served.finish()
            found.append(served.server is None or served.server.version == 100)
        return found


def test_two_gpus_that_push_at_the_same_time_pull_the_same_parameters(on_ranks: Any, tmp_path: Any) -> None:
    assert on_ranks(2, crowded, group=False, folder=str(tmp_path)) == [[True] * 4] * 2


def work_or_desert(on_gpu: World) -> list[Any]:
    """On rank 1, which serves nothing, announce a gradient in the third step and disappear before it is sent."""
    group = dist.new_group(backend="gloo")
    model = nn.Linear(300, 7).to(on_gpu.device)
    served = AsynchronousOptimizer(model.parameters(), torch.optim.SGD, group, servers=1, lr=0.1)
    for step in range(6):
        if on_gpu.rank == 1 and step == 2:
            dist.send(served._request(PUSH), group=group, group_dst=0, tag=TAG)
            dist.destroy_process_group(group)
            return []
        served.zero_grad()
        model(torch.randn(4, 300, device=on_gpu.device)).sum().backward()
        served.step()
    served.finish()
    assert served.server is not None
    torch.cuda.synchronize()
    return [served.server.version, served.server.lost]


def deserted(world: World, folder: str) -> list[Any]:
    with over("nccl", world, folder) as on_gpu:
        return work_or_desert(on_gpu)  # a function of its own: its group closes when it returns


def test_a_lost_worker_takes_only_its_own_communicator_along(on_ranks: Any, tmp_path: Any) -> None:
    assert on_ranks(2, deserted, group=False, folder=str(tmp_path)) == [[8, [1]], []]
