"""Ranks on GPUs: the forks of the rank server, each with a device of its own."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from muster.jobs.world.world import World

TIMEOUT = timedelta(seconds=50)


@contextmanager
def over(backend: str, world: World, folder: str) -> Iterator[World]:
    """Give this rank the device of its number, and a group over a backend; call on a rank made with group=False."""
    warnings.simplefilter("default")  # what NCCL remarks is no error of ours
    device = torch.device("cuda", world.rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", world.size),
        rank=world.rank,
        world_size=world.size,
        timeout=TIMEOUT,
        device_id=device if backend == "nccl" else None,
    )
    group = dist.group.WORLD
    assert group is not None
    dist.all_reduce(torch.zeros(1, device=device))  # all meet, as NCCL's messages ask for
    yield World(world.rank, world.size, group, device)
    torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)
    dist.destroy_process_group()
