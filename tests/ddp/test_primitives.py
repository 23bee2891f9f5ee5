"""Rings, trees and exchanges compared with `torch.distributed` and with one process."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from muster.ddp import primitives
from muster.jobs.world.world import World
from support.primitives import DTYPES, check_all, whole
from support.refusals import said_by

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

EVERY_WORLD = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw numbers whose sums are rounded, so that the order of a sum matters."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 100).to(dtype)


def check(world: World) -> None:
    check_all(world)


@EVERY_WORLD
def test_every_primitive_gives_what_one_process_would(on_ranks, world_size):
    on_ranks(world_size, check)


def ordered_and_ring(world: World, count: int, dtype: str) -> list[bool]:
    kind = DTYPES[dtype]
    every = [numbers(rank, count, kind) for rank in range(world.size)]
    total = every[0].clone()
    for other in every[1:]:
        total += other
    ordered, ring, library = (every[world.rank].clone() for _ in range(3))
    primitives.ordered_all_reduce(ordered, world.group)
    primitives.ring_all_reduce(ring, world.group)
    dist.all_reduce(library, group=world.group)
    out = torch.empty_like(primitives.chunks_of(total, world.size)[world.rank])
    primitives.ordered_reduce_scatter(every[world.rank], out, world.group)
    on_all = [torch.empty_like(ring) for _ in range(world.size)]
    dist.all_gather(on_all, ring, group=world.group)
    return [
        torch.equal(ordered, total),
        torch.equal(out, primitives.chunks_of(total, world.size)[world.rank]),
        all(torch.equal(each, ring) for each in on_all),
        torch.allclose(ring.double(), library.double(), rtol=0.05, atol=8),
        torch.equal(ring, total),
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_ordered_sums_have_the_bits_of_one_process_and_a_ring_s_are_the_same_on_all_ranks(on_ranks, dtype):
    for ordered, out, same, close, ring_is_ordered in on_ranks(4, ordered_and_ring, count=100_003, dtype=dtype):
        assert [ordered, out, same, close] == [True] * 4
        assert not ring_is_ordered, "numbers that need rounding show the order of a sum"


def in_a_sub_group(world: World) -> str:
    group = dist.new_group([3, 1, 4])  # group ranks 0, 1, 2 are 1, 3, 4, because torch sorts them
    outside = ""
    if dist.get_rank(group) < 0:
        outside = said_by(lambda: primitives.ring_all_reduce(torch.ones(3), group), ValueError)
    else:
        check_all(World(dist.get_rank(group), 3, group, world.device))
    dist.barrier(world.group)
    return outside


def test_a_group_of_some_ranks_works_by_its_own_numbers_and_refuses_the_others(on_ranks):
    refused = "this rank is not in the group; call this only on ranks of the group"
    assert on_ranks(5, in_a_sub_group) == [refused, "", refused, "", ""]


def refusals(world: World) -> list[str]:
    numbers = torch.zeros(8)
    pair, out = torch.zeros(2, 4), torch.zeros(4)
    calls = [
        lambda: primitives.ring_reduce_scatter([numbers], out),
        lambda: primitives.ring_reduce_scatter([numbers[:5], numbers[5:]], numbers[:6]),
        lambda: primitives.ring_reduce_scatter(numbers, out.half()),
        lambda: primitives.ring_all_gather(out, torch.zeros(10)),
        lambda: primitives.ring_all_reduce(pair),
        lambda: primitives.ring_all_reduce(numbers[::2]),
        lambda: primitives.tree_broadcast(pair),
        lambda: primitives.tree_reduce(numbers, root=2),
        lambda: primitives.exchange([], [out, out]),
        lambda: primitives.exchange([out, out[:3]], [out[:2], out]),
        lambda: primitives.exchange([out, out], [out, out.int()]),
        lambda: primitives.ordered_reduce_scatter([out, pair], out),
        lambda: primitives.ordered_all_reduce(pair),
    ]
    found = [said_by(call, ValueError) for call in calls]
    whole = torch.full((8,), world.rank + 1.0)
    primitives.ring_all_reduce(whole)  # nothing was sent before, so there is no stray message
    found.append(str(whole.unique().tolist()))
    return found


def test_what_does_not_fit_is_named_before_anything_is_sent(on_ranks):
    first, second = on_ranks(2, refusals)
    assert first == [
        "got 1 chunks for 2 ranks; pass one for each rank of the group",
        "out has 6 elements, chunk 0 has 5; make them equal",
        "out is torch.float16 on cpu, but others are torch.float32 on cpu; use the same type and device",
        "chunk has 4 elements, entry 0 of out has 5; make them equal",
        "tensor[0] has shape (1, 4), strides (4, 1); flatten it first",
        "tensor[0] has shape (2,), strides (2,); flatten it first",
        "tensor has shape (2, 4), strides (4, 1); flatten it first",
        "root 2 is not in the group; pass one of its ranks, 0 to 1",
        "got 0 chunks for 2 ranks; pass one for each rank of the group",
        "input 0 has 4 elements, output 0 has 2; make them equal",
        "outputs[1] is torch.int32 on cpu, but others are torch.float32 on cpu; use the same type and device",
        "chunks[1] has shape (2, 4), strides (4, 1); flatten it first",
        "tensor[0] has shape (1, 4), strides (4, 1); flatten it first",
        "[3.0]",
    ]
    assert second[1] == "out has 6 elements, chunk 1 has 3; make them equal"


def long_ones(world: World) -> list[bool]:
    """Tensors of many messages: 9 MB of fp32, in several columns."""
    count = 2_250_007
    every = [whole(rank, count, torch.float32) for rank in range(world.size)]
    total = torch.stack(every).sum(0)
    found = []
    for function in (primitives.ring_all_reduce, primitives.ordered_all_reduce):
        mine = every[world.rank].clone()
        function(mine, world.group)
        found.append(torch.equal(mine, total))
    mine = every[world.rank].clone()
    primitives.tree_reduce(mine, 0, world.group)
    found.append(world.rank > 0 or torch.equal(mine, total))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_long_tensors_go_in_many_columns(on_ranks, world_size):
    assert on_ranks(world_size, long_ones) == [[True] * 3] * world_size


def left_alone(world: World) -> str:
    """Rank 0 waits for a rank that never sends, in a group whose timeout was shortened after its creation."""
    _set_pg_timeout(timedelta(seconds=1), world.group)
    store = world.group.get_group_store()
    if world.rank == 0:
        said = said_by(lambda: primitives.ring_all_gather(torch.zeros(2), torch.zeros(4), world.group), RuntimeError)
        store.set("left alone", "over")
        return "timed out" if "imed out" in said else said
    store.wait(["left alone"])
    return ""


def test_a_message_takes_no_longer_than_the_group_allows_now(on_ranks):
    assert on_ranks(2, left_alone, deadline_s=15.0)[0] == "timed out"  # after less than the group's first timeout
