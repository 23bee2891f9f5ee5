"""The wrappers as a library: any module, real ranks, one process as the reference."""

import copy

import pytest
import torch
from torch import nn

from ddp import AllReduce, GatherScatter
from jobs.train.world import World

pytestmark = pytest.mark.ranks

WRAPPERS = {"gather_scatter": GatherScatter, "all_reduce": AllReduce}
EVERY_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)


class Odd(nn.Module):
    """Tied, frozen and unused parameters, a buffer, odd sizes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(7, 15, generator=generator))
        self.frozen = nn.Parameter(torch.randn(15, generator=generator), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(15, generator=generator))
        self.permuted = nn.Parameter(torch.randn(5, 15, generator=generator).t())
        self.register_buffer("scale", torch.full((), float(seed)))

    def forward(self, inputs: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        hidden = torch.tanh(inputs @ self.first + self.frozen) * self.scale
        if use_all:
            hidden = hidden * self.sometimes
        return (hidden @ self.permuted).square().sum() + (inputs @ self.first).sum()  # `first` is used twice


def inputs_of(shard: int) -> torch.Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(100 + shard))


def gradients(module: nn.Module) -> dict:
    return {name: each.grad.tolist() for name, each in module.named_parameters() if each.grad is not None}


def one_process(shards: int, use_all=lambda shard: True) -> dict:
    model = Odd(seed=1)
    total: dict[str, torch.Tensor] = {}
    for shard in range(shards):
        model.zero_grad()
        model(inputs_of(shard), use_all(shard)).backward()
        for name, each in model.named_parameters():
            if each.requires_grad:
                grad = torch.zeros_like(each) if each.grad is None else each.grad
                total[name] = grad.clone() if shard == 0 else total[name] + grad
    return {name: (grad / shards if shards > 1 else grad).tolist() for name, grad in total.items()}


def start(world: World, wrapper: str) -> dict:
    model = WRAPPERS[wrapper](Odd(seed=world.rank + 1), world.group)
    return {name: tensor.tolist() for name, tensor in model.module.state_dict().items()}


@EVERY_WRAPPER
def test_every_rank_starts_with_parameters_and_buffers_of_rank_0(on_ranks, wrapper):
    wanted = {name: tensor.tolist() for name, tensor in Odd(seed=1).state_dict().items()}
    assert on_ranks(3, start, wrapper=wrapper) == [wanted] * 3


def one_shard_each(world: World, wrapper: str) -> dict:
    model = WRAPPERS[wrapper](Odd(seed=1), world.group)
    model(inputs_of(world.rank)).backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


@EVERY_WRAPPER
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_become_the_mean_over_ranks_bit_for_bit(on_ranks, wrapper, world_size):
    assert on_ranks(world_size, one_shard_each, wrapper=wrapper) == [one_process(world_size)] * world_size


def test_gather_scatter_sums_in_rank_order_on_four_ranks(on_ranks):
    assert on_ranks(4, one_shard_each, wrapper="gather_scatter") == [one_process(4)] * 4


def virtual_shards(world: World, wrapper: str, shards: int) -> dict:
    model = WRAPPERS[wrapper](Odd(seed=1), world.group)
    each = shards // world.size
    for shard in range(world.rank * each, (world.rank + 1) * each):
        model(inputs_of(shard)).backward()
        model.next_shard()
    model.finish_gradient_synchronization()
    return gradients(model.module)


@EVERY_WRAPPER
@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_virtual_shards_give_the_same_bits_on_any_number_of_ranks(on_ranks, wrapper, world_size):
    assert on_ranks(world_size, virtual_shards, wrapper=wrapper, shards=6) == [one_process(6)] * world_size


def unused_on_some(world: World, wrapper: str) -> dict:
    model = WRAPPERS[wrapper](Odd(seed=1), world.group)
    model(inputs_of(world.rank), use_all=world.rank == 1).backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


@EVERY_WRAPPER
def test_a_parameter_without_gradient_on_some_ranks_counts_as_zeros_there(on_ranks, wrapper):
    wanted = one_process(2, use_all=lambda shard: shard == 1)
    assert on_ranks(2, unused_on_some, wrapper=wrapper) == [wanted] * 2


def within_no_sync(world: World, wrapper: str) -> list:
    model = WRAPPERS[wrapper](Odd(seed=1), world.group)
    with model.no_sync():
        model(inputs_of(world.rank)).backward()
        model.finish_gradient_synchronization()
    local = copy.deepcopy(gradients(model.module))
    model(inputs_of(world.rank)).backward()
    model.finish_gradient_synchronization()
    return [local["sometimes"], gradients(model.module)["sometimes"]]


@EVERY_WRAPPER
def test_no_sync_only_accumulates_and_the_next_finish_averages_both(on_ranks, wrapper):
    local, mean = zip(*on_ranks(2, within_no_sync, wrapper=wrapper), strict=True)
    own = []
    for rank in range(2):
        model = Odd(seed=1)
        model(inputs_of(rank)).backward()
        own.append(model.sometimes.grad.clone())
    assert list(local) == [each.tolist() for each in own]
    doubled = (2 * own[0] + 2 * own[1]) / 2  # doubling is exact
    assert list(mean) == [doubled.tolist()] * 2


def left_over(world: World) -> str:
    model = AllReduce(Odd(seed=1), world.group)
    model(inputs_of(0)).backward()
    model.next_shard()
    model(inputs_of(1)).backward()
    try:
        model.finish_gradient_synchronization()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_gradients_after_the_last_closed_shard_are_an_error(on_ranks):
    assert on_ranks(1, left_over) == ["gradients after the last next_shard(): close every virtual shard, or none"]


def test_the_package_lists_its_wrappers_without_importing_torch():
    import subprocess
    import sys

    code = "import ddp, sys; print(sorted(ddp.__all__), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['AllReduce', 'GatherScatter'] False"
