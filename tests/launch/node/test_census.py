"""Who has reached a real store of torch's, as the kernel tells it."""

import os

import pytest
import torch.distributed as dist

from muster.jobs.world.world import World
from muster.launch.node.census import connected

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LOOPBACK = "127.0.0.1"


def arrivals(world: World) -> list[list[int]]:
    """Rank 0 hosts a store and looks before rank 1 comes to it and after; rank 2 never comes."""
    server = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False) if world.rank == 0 else None
    told: list[tuple[int, int]] = [(0, 0)] * world.size
    dist.all_gather_object(told, (os.getpid(), server.port if server else 0))
    pids, port = {rank: pid for rank, (pid, _) in enumerate(told)}, told[0][1]
    seen = [sorted(connected(pids, port))]
    dist.barrier()
    client = dist.TCPStore(LOOPBACK, port, is_master=False) if world.rank == 1 else None
    dist.barrier()
    seen.append(sorted(connected(pids, port)))
    dist.barrier()  # nobody leaves while others look
    del client, server
    return seen


def test_a_rank_has_arrived_once_it_is_connected_with_the_store(on_ranks) -> None:
    assert on_ranks(3, arrivals) == [[[0], [0, 1]]] * 3
