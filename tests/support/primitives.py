"""Every primitive of `ddp.primitives` against what one process computes, on CPUs and on GPUs."""

import torch

from muster.ddp import primitives
from muster.jobs.world.world import World

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int32": torch.int32,
}
LENGTHS = [1, 5, 100_003]  # fewer than ranks, odd, several messages long


def whole(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw small whole numbers, whose sums are exact in every type."""
    generator = torch.Generator().manual_seed(2000 + rank)
    return torch.randint(-20, 20, (count,), generator=generator).to(dtype)


def cut_unevenly(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cut a tensor into lengths that differ much; one is empty where there are three or more."""
    first = tensor.numel() // 4 if count > 1 else 0
    return list(tensor.split([first, *[0] * (count - 2), tensor.numel() - first][-count:]))


def check_all(world: World) -> None:
    """Compare every primitive with the library's, for every type and length."""
    for name, dtype in DTYPES.items():
        for count in LENGTHS:
            every = [whole(rank, count, dtype).to(world.device) for rank in range(world.size)]
            total = torch.stack(every).sum(0, dtype=dtype)
            for function in (primitives.ring_all_reduce, primitives.ordered_all_reduce):
                mine = every[world.rank].clone()
                function(mine, world.group)
                assert torch.equal(mine, total), (function, name, count)
            for root in range(world.size):
                mine = every[world.rank].clone()
                primitives.tree_broadcast(mine, root, world.group)
                assert torch.equal(mine, every[root]), (name, count, root)
                mine = every[world.rank].clone()
                primitives.tree_reduce(mine, root, world.group)
                assert world.rank != root or torch.equal(mine, total), (name, count, root)
            check_scatters(world, every, total)
            check_moves(world, every)


def check_scatters(world: World, every: list[torch.Tensor], total: torch.Tensor) -> None:
    for cut in (primitives.chunks_of, cut_unevenly):
        wanted = cut(total, world.size)[world.rank]
        for function in (primitives.ring_reduce_scatter, primitives.ordered_reduce_scatter):
            mine = every[world.rank].clone()
            out = torch.full_like(wanted, 99)
            function(cut(mine, world.size), out, world.group)
            assert torch.equal(out, wanted), function
            assert torch.equal(mine, every[world.rank]), f"{function} wrote over its input"
            inside = cut(mine, world.size)[world.rank]
            function(cut(mine, world.size), inside, world.group)
            assert torch.equal(inside, wanted), f"{function} in place"


def check_moves(world: World, every: list[torch.Tensor]) -> None:
    for cut in (primitives.chunks_of, cut_unevenly):
        # all-gather: rank r's chunk is what it has at its own place
        wanted = torch.cat([cut(tensor, world.size)[rank] for rank, tensor in enumerate(every)])
        out = torch.full_like(wanted, 99)
        primitives.ring_all_gather(cut(every[world.rank], world.size)[world.rank], cut(out, world.size), world.group)
        assert torch.equal(out, wanted)
        mine = every[world.rank].clone()
        primitives.ring_all_gather(cut(mine, world.size)[world.rank], cut(mine, world.size), world.group)
        assert torch.equal(mine, wanted), "in place"
        # all-to-all: rank r gets piece r of everybody, whatever its length
        got = [torch.full_like(cut(tensor, world.size)[world.rank], 99) for tensor in every]
        primitives.exchange(cut(every[world.rank], world.size), got, world.group)
        assert all(
            torch.equal(piece, cut(each, world.size)[world.rank]) for piece, each in zip(got, every, strict=True)
        )
