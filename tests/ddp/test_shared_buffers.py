"""Buffers that follow rank 0 are those of PyTorch's DDP."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muster import ddp
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from support.data_parallel import WRAPPERS, states_apart

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class Counting(nn.Module):
    """A batch norm, and buffers of other types and layouts, which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("wide", torch.zeros(2, 3, dtype=torch.float64).t())
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.logical_xor_(x[:3, 0] > 0)
        self.wide.add_(x[0, 0].double())
        return self.out(self.norm(x))


def train(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        if step == 1:
            with model.no_sync():
                model(torch.randn(5, 4)).sum().backward()
        model(torch.randn(5, 4)).sum().backward()
        if isinstance(model, ddp.GatherScatter | ddp.AllReduce | ddp.FlatAllReduce):
            model.finish_gradient_synchronization()
    return {name: each.clone() for name, each in model.named_buffers()}


def apart_from_torch(world: World) -> list[str]:
    theirs = {
        name.removeprefix("module."): each
        for name, each in train(DistributedDataParallel(Counting()), world.rank).items()
    }
    problems = []
    for wrapper in WRAPPERS:
        ours = train(getattr(ddp, wrapper)(Counting(), broadcast_buffers=True), world.rank)
        problems += [f"{wrapper}: {each}" for each in states_apart(ours, theirs)]
    for stage in (1, 2, 3):
        ours = train(ShardedDataParallel(Counting(), stage=stage, broadcast_buffers=True), world.rank)
        problems += [f"stage {stage}: {each}" for each in states_apart(ours, theirs)]
    alone = train(ddp.AllReduce(Counting()), world.rank)
    return problems + ["buffers follow rank 0 unasked"] * (world.rank > 0 and not states_apart(alone, theirs))


def test_buffers_follow_rank_0_as_in_torch(on_ranks) -> None:
    assert on_ranks(2, apart_from_torch) == [[], []]


def refused(world: World) -> str:
    with pytest.raises(ValueError, match="broadcast_buffers") as error:
        ddp.AllReduce(Counting(), broadcast_buffers=world.rank == 0)
    return str(error.value)


def test_ranks_that_differ_in_the_setting_are_refused(on_ranks) -> None:
    assert len(set(on_ranks(2, refused))) <= 2
