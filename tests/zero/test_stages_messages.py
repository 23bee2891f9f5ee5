"""Communication of stages 1 and 2: what they send, when they wait, and who holds what."""

from unittest import mock

import pytest
import torch
from torch import nn

from muster.ddp.primitives.peers import Peers
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from muster.zero.flat import FlatParameters
from muster.zero.gather import BroadcastGather, LinkGather
from support.data_parallel_models import CASES, seeded
from support.sharded import not_sharded, over_links
from support.zero_use import wrap

pytestmark = pytest.mark.ranks

TOY = CASES["toy"]


def shares(world: World) -> list[str]:
    return [f"stage {stage}: {each}" for stage in (1, 2, 3) for each in not_sharded(world, stage)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_holds_its_share(on_ranks, world_size):
    assert on_ranks(world_size, shares) == [[]] * world_size


def sent_bytes(world: World) -> list[int]:
    """Return the bytes that a rank sends in a step of stages 1 and 2, and twice what a ring sends of the gradients."""
    sent: list[int] = []
    post = Peers.post

    def counted(peers: Peers, **posted):
        sent.extend(tensor.nbytes for tensor, _ in posted["sends"])
        return post(peers, **posted)

    found = []
    for stage in (1, 2):
        with over_links():
            model = wrap(world, stage, CASES["chain"].build.args[0], exact=False)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        CASES["chain"].loss(model, 0).backward()  # the first one also exchanges which parameters are used
        with mock.patch.object(Peers, "post", counted):
            model.zero_grad()
            CASES["chain"].loss(model, 0).backward()
            optimizer.step()
            model.synchronize()
        found.append(sum(sent))
        sent.clear()
    whole = sum(each.nbytes for each in model.module.parameters())
    return [*found, 2 * whole * (world.size - 1) // world.size]


def test_a_step_sends_gradients_once_and_parameters_once(on_ranks):
    for one, two, wanted in on_ranks(4, sent_bytes):
        assert one == two == wanted


def gathered(world: World) -> list[bool]:
    """Return for each gather on CPUs whether it makes shards whole, also if waited for twice."""
    right = []
    for gather in (LinkGather(world.group, torch.device("cpu")), BroadcastGather(world.group)):
        flat_parameter = FlatParameters(
            [("a", nn.Parameter(torch.zeros(37))), ("b", nn.Parameter(torch.zeros(5)))], **place(world)
        )
        flat_parameter.shard.fill_(world.rank + 1)
        wait = gather.start(flat_parameter, flat_parameter.shard, flat_parameter.full)
        wait()
        wait()
        right.append(
            all(bool((part == rank + 1).all()) for rank, part in enumerate(flat_parameter.parts(flat_parameter.full)))
        )
    return right


def place(world: World) -> dict[str, int]:
    return {"rank": world.rank, "ranks": world.size}


def test_a_ring_and_broadcasts_gather_the_same(on_ranks):
    assert on_ranks(3, gathered) == [[True, True]] * 3


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        return inputs


def order_of_events(world: World) -> list[str]:
    """Let the gathers end as late as possible: each begins when the block before the one that needs it has begun."""
    events: list[str] = []

    class LateGather(LinkGather):
        def start(self, flat_parameter, shard, out):
            waits: list = []

            def wait() -> None:
                events.append(f"waits for {flat_parameter.names[0].removesuffix('.bias')}")
                waits[0]() if waits else None

            waits.append(super().start(flat_parameter, shard, out))
            return wait

    with over_links(), mock.patch("muster.zero.gather.LinkGather", LateGather):
        module = seeded(Blocks, 1)
        model = ShardedDataParallel(module, world.group, stage=2, units=module.blocks, bucket_size_mb=1100 / 2**20)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    for name, block in enumerate(module.blocks):
        block.register_forward_hook(lambda *_, name=name: events.append(f"ran {name}"))
    model(torch.ones(2, 16))
    return events


def test_a_unit_waits_for_its_own_parameters_only_when_it_runs(on_ranks):
    wanted = [event for place in range(4) for event in (f"waits for blocks.{place}", f"ran {place}")]
    assert on_ranks(2, order_of_events) == [wanted] * 2
