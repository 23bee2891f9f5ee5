"""Messages between GPUs by copy engines. `pytest -m gpu` on a machine with at least two CUDA devices."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from muster.jobs.world.world import World
from muster.pipe.wires.peers import PeerWire, peers_of
from muster.pipe.wires.wire import GlooWire, own_group
from support.gpus import TIMEOUT, over

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

SIZES = [0, 1, 5, 1000, 70_000, 3 << 20]  # elements of a message


def wire_of(world: World) -> PeerWire:
    group = own_group(world.group, "gloo", TIMEOUT)
    wire = peers_of(group, {1 - world.rank}, world.device, GlooWire(group, TIMEOUT))
    assert wire is not None
    return wire


def content(source: int, number: int, size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device, dtype=torch.int32) + 1000 * number + source


def exchanged(world: World, folder: str, room: int) -> list[str]:
    """Send messages of all sizes in both directions, with late and early waits; name those that arrived wrong."""
    problems = []
    with over("nccl", world, folder) as here:
        wire, peer, rng = wire_of(here), 1 - here.rank, random.Random(3)
        wire.expect({(0, 1): room, (1, 0): room})
        for burst in range(60):
            sizes = [rng.choice(SIZES) for _ in range(room)]
            going = []
            for number, size in enumerate(sizes):
                mine = content(here.rank, burst + number, size, here.device)
                going.append((wire.send(mine, peer, 0), mine))
            buffers = [torch.full((size,), -1, dtype=torch.int32, device=here.device) for size in sizes]
            coming = [wire.receive(each, peer, 0, wire.mark()) for each in buffers]
            order = list(range(room))
            rng.shuffle(order)
            for number in order:
                coming[number].wait()
                wanted = content(peer, burst + number, sizes[number], here.device)
                if not torch.equal(buffers[number], wanted):
                    problems.append(f"burst {burst}: message {number} of {sizes[number]} numbers")
            for message, mine in going:
                message.wait()
                mine.fill_(-7)  # the sent tensor may be overwritten now
    return problems


@pytest.mark.parametrize("room", [1, 3, 9])
def test_messages_come_whole_and_in_their_order(on_ranks, tmp_path: Path, room: int):
    assert on_ranks(2, exchanged, deadline_s=60.0, group=False, folder=str(tmp_path), room=room) == [[]] * 2


def released(world: World, folder: str) -> bool:
    """Make rank 0's GPU wait for a message that never comes, until rank 1 aborts; return whether it waited."""
    with over("nccl", world, folder) as here:
        wire, peer = wire_of(here), 1 - here.rank
        numbers = torch.zeros(4, device=here.device)
        wire.send(numbers, peer, 0)  # creates slots of that size in both directions
        wire.receive(numbers, peer, 0).wait()
        torch.cuda.synchronize(here.device)
        if here.rank == 0:
            wire.receive(numbers, peer, 0).wait()
            waits = not torch.cuda.current_stream(here.device).query()
            barrier(here)
            torch.cuda.synchronize(here.device)  # would hang without rank 1
            return waits
        barrier(here)
        wire.abort()
        return wire.is_idle()


def barrier(here: World) -> None:
    """Wait for both ranks, on the host only."""
    dist.barrier(own_group(here.group, "gloo", TIMEOUT))


def test_who_gives_up_lets_go_of_the_others(on_ranks, tmp_path: Path):
    assert on_ranks(2, released, deadline_s=40.0, group=False, folder=str(tmp_path)) == [True, True]
