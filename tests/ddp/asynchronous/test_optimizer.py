"""Asynchronous SGD: one worker equals one process, staleness is counted right, bytes match the formula."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.ddp.asynchronous.optimizer import AsynchronousOptimizer
from muster.ddp.asynchronous.shards import bounds, sent_bytes
from muster.jobs.world.world import World

pytestmark = pytest.mark.ranks

SCRIPT = [0, 1, 1, 2, 0, 2, 1, 0]  # which worker steps next


def network() -> nn.Module:
    """Return the same small network on every rank; 64 parameters, which 3 servers cannot share equally."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3), nn.LayerNorm(2 + 1, bias=False), nn.Linear(3, 1))


def work(model: nn.Module, step: int) -> None:
    """Run forward and backward on data of this step."""
    model.zero_grad()
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    model(inputs).square().mean().backward()


def test_shards_cover_all_elements_and_differ_by_at_most_one():
    cuts = bounds(62, 4)
    assert [start for start, _ in cuts[1:]] == [stop for _, stop in cuts[:-1]]
    assert sorted(stop - start for start, stop in cuts) == [15, 15, 16, 16]


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_all_ranks_together_send_twice_the_model_for_every_worker_but_one(servers):
    each = sent_bytes(1000, 4, 4, servers, headers=False)
    assert sum(each) == 2 * 3 * 4000
    if servers == 4:  # as a ring all-reduce
        assert set(each) == {2 * 3 * 1000}
    if servers == 1:  # as gather and scatter through rank 0
        assert each == [12000, 4000, 4000, 4000]


def alone(world: World) -> bool:
    ours, theirs = network(), network()
    optimizer = AsynchronousOptimizer(ours.parameters(), torch.optim.AdamW, world.group, lr=0.1, fused=False)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.1, fused=False)
    for step in range(4):
        for model, steps in ((ours, optimizer), (theirs, reference)):
            work(model, step)
            steps.step()
    optimizer.finish()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(mine, yours) for mine, yours in pairs)


def test_one_worker_has_the_same_bits_as_one_process(on_ranks):
    assert on_ranks(1, alone) == [True]


def scripted(world: World, servers: int) -> dict:
    """Step in the order of SCRIPT; the last to step hands on the turn."""
    model = network()
    optimizer = AsynchronousOptimizer(model.parameters(), torch.optim.SGD, world.group, servers=servers, lr=0.1)
    said = []
    for step, worker in enumerate(SCRIPT):
        if worker == world.rank:
            work(model, step)
            optimizer.step()
            said.append(optimizer.staleness)
        dist.barrier()
    optimizer.pull()
    state = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    optimizer.finish()
    return {"staleness": said, "state": state}


def replay() -> tuple[dict[int, list[int]], list[float]]:
    """Return the staleness of each worker's steps and the last parameters, by one process that keeps the versions."""
    server = network()
    optimizer = torch.optim.SGD(server.parameters(), lr=0.1)
    copies, versions = [copy.deepcopy(server) for _ in range(3)], [0, 0, 0]
    staleness: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step, worker in enumerate(SCRIPT):
        work(copies[worker], step)
        for own, pushed in zip(server.parameters(), copies[worker].parameters(), strict=True):
            own.grad = pushed.grad / 3
        optimizer.step()
        staleness[worker].append(step - versions[worker])
        copies[worker], versions[worker] = copy.deepcopy(server), step + 1
    return staleness, torch.cat([each.detach().flatten() for each in server.parameters()]).tolist()


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_scripted_schedule_gives_the_staleness_and_the_parameters_of_its_replay(on_ranks, servers):
    wanted, state = replay()
    assert wanted == {0: [0, 3, 2], 1: [1, 0, 3], 2: [3, 1]}
    for rank, found in enumerate(on_ranks(3, scripted, servers=servers)):
        assert found["staleness"] == [[each] * servers for each in wanted[rank]]
        assert found["state"] == state


def deserted(world: World) -> list:
    """Rank 2, which serves nothing, disappears after its first step; the others go on."""
    group = dist.new_group()
    model = network()
    optimizer = AsynchronousOptimizer(model.parameters(), torch.optim.SGD, group, servers=2, lr=0.1)
    for step in range(6):
        if world.rank == 2 and step == 1:
            dist.destroy_process_group(group)
            return []
        work(model, step)
        optimizer.step()
    optimizer.finish()
    return [optimizer.server.version, optimizer.server.lost]


def test_a_lost_worker_without_a_shard_stops_nobody(on_ranks):
    assert on_ranks(3, deserted)[:2] == [[13, [2]], [13, [2]]]


@pytest.mark.parametrize("servers", [0, 2])
def test_more_servers_than_ranks_are_refused(on_ranks, servers):
    [said] = on_ranks(1, refused, servers=servers)
    assert said == f"servers must be from 1 to the number of ranks, 1, got {servers}"


def refused(world: World, servers: int) -> str:
    try:
        AsynchronousOptimizer(network().parameters(), torch.optim.SGD, world.group, servers=servers, lr=0.1)
    except ValueError as error:
        return str(error)
    return ""
