"""Gradients that are sent where autograd made them, as with NCCL; here over gloo, with the same bookkeeping.

`test_ddp_gpu.py` tests the same cases with NCCL.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.ddp import BucketedDDP, gradients
from muster.ddp.means import NcclMean
from muster.jobs.world.world import World
from support.data_parallel import wrong_gradients, wrong_training

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class InPlace(NcclMean):
    """Averages tensors in place at once, over any backend. Operations that still read them would see the mean."""

    def start(self, bucket: Any) -> Any:
        for tensor in bucket.tensors:
            whole = tensor.contiguous()
            dist.all_reduce(whole, group=self.group)
            tensor.copy_(whole.div_(self.ranks))
        return lambda: None


def in_place() -> Any:
    return mock.patch("muster.ddp.bucketed.mean_for", lambda group, device, **promises: InPlace(group))


def all_in_place(world: World) -> list[str]:
    problems = []
    with in_place():
        for size in (0.0, 1e-3, None):
            for case in ("toy", "tied", "odd", "tiny", "double", "unused in odd shards", "never used", "gpt"):
                found = wrong_gradients(world, "BucketedDDP", case, bucket_size_mb=size)
                problems += [f"{case}, {size}: {each}" for each in found]
        for wrapper in ("BucketedDDP", "OverlappedDDP"):
            for optimizer in ("sgd", "adamw"):
                found = wrong_training(world, wrapper, "toy", optimizer)
                problems += [f"{wrapper}, {optimizer}: {each}" for each in found]
    return problems


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_averaged_in_place_are_those_of_one_process(on_ranks, world_size):
    assert on_ranks(world_size, all_in_place) == [[]] * world_size


class Sharing(nn.Module):
    """A parameter whose gradient is a view of memory that the rest of the backward still reads."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Parameter(torch.full((6,), 2.0))
        self.late = nn.Parameter(torch.full((2, 3), 3.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        early = self.early * inputs  # its backward runs after that of the view, and differs between ranks
        return ((self.late.view(-1) + early) * inputs).sum()


def kept_apart(world: World) -> list[list[float]]:
    with in_place():
        model = BucketedDDP(Sharing(), world.group, bucket_size_mb=0.0)
        model(torch.arange(6.0) * (world.rank + 1)).backward()
    return [each.grad.flatten().tolist() for each in model.parameters()]


def test_a_gradient_that_shares_its_memory_is_averaged_in_a_copy(on_ranks):
    of_ranks = []
    for rank in range(2):
        alone = Sharing()
        alone(torch.arange(6.0) * (rank + 1)).backward()
        of_ranks.append([each.grad.flatten() for each in alone.parameters()])
    wanted = [((one + two) / 2).tolist() for one, two in zip(*of_ranks, strict=True)]
    assert on_ranks(2, kept_apart) == [wanted] * 2


def copies(world: World) -> int:
    with in_place():
        model = BucketedDDP(nn.Sequential(*(nn.Linear(9, 9) for _ in range(4))), world.group, bucket_size_mb=1e-3)
        with mock.patch("muster.ddp.gradients.torch.empty_like", side_effect=torch.empty_like) as made:
            model(torch.ones(2, 9)).sum().backward()
        return made.call_count


def test_nothing_is_copied_that_nobody_shares(on_ranks):
    assert gradients.UNSHARED == 2
    assert on_ranks(2, copies) == [0, 0]
