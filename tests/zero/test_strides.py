"""Parameters that are not row-major keep their strides in a `ShardedOptimizer`, because DDP relies on them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import BucketedDDP
from muster.jobs.world.world import World
from muster.zero import ShardedOptimizer

pytestmark = pytest.mark.ranks

WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "torch": DistributedDataParallel,
    "torch, views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=0.0001),
    "torch, static": lambda module: DistributedDataParallel(module, static_graph=True),
    "ours": BucketedDDP,
}


class Images(nn.Module):
    """Parameters that are row-major, channels last, transposed or permuted, have gaps, or have one element."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.small = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1)
        self.mixed = nn.Parameter(torch.randn(6, 4).t())  # (4, 6), strides (1, 4)
        self.permuted = nn.Parameter(torch.randn(2, 3, 6).permute(2, 0, 1))
        self.gaps = nn.Parameter(torch.randn(6, 4)[:, ::2])
        self.number = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, 5, 5) to (batch, 2, 3)."""
        hidden = torch.tanh(self.small(self.conv(x))).mean((2, 3)) @ self.mixed
        hidden = hidden + (hidden @ self.gaps) @ self.gaps.t() * self.number
        return torch.einsum("bi,ijk->bjk", hidden, self.permuted)


class Side:
    """A model with an optimizer, of one process or of ranks."""

    def __init__(self, build: Any = torch.optim.AdamW, wrap: Callable[[nn.Module], Any] | None = None) -> None:
        torch.manual_seed(0)
        self.module = Images().double().to(memory_format=torch.channels_last)
        self.run = self.module if wrap is None else wrap(self.module)
        self.optimizer = build(self.module.parameters(), lr=0.05)

    def step(self, step: int, shards: list[int]) -> None:
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        for shard in shards:
            x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(shard), dtype=torch.float64)
            (self.run(x).pow(2).mean() / len(shards)).backward()
        if step == 2:
            clip = getattr(self.optimizer, "clip_grad_norm_", None)
            _ = clip(0.01) if clip else nn.utils.clip_grad_norm_(self.module.parameters(), 0.01)
        self.optimizer.step()

    def strides(self) -> list[tuple[int, ...]]:
        return [each.stride() for each in self.module.parameters()]


def sharded(params: Any, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(params, torch.optim.AdamW, **options)


def train(world: World, ours: Side, whole: Side, steps: range) -> list[str]:
    """Train; name the parameters that differ from those of one process."""
    for step in steps:
        ours.step(step, [step * world.size + world.rank])
        whole.step(step, [step * world.size + rank for rank in range(world.size)])
    pairs = zip(ours.module.named_parameters(), whole.module.parameters(), strict=True)
    return [name for (name, each), other in pairs if not torch.allclose(each, other, rtol=1e-12, atol=1e-12)]


def after_a_wrapper(world: World) -> list[str]:
    """Train, and load the state into plain and sharded optimizers of parameters with other strides."""
    problems = []
    for name, wrap in WRAPS.items():
        ours, whole = Side(sharded, wrap), Side()
        problems += [f"{name}: {each}" for each in train(world, ours, whole, range(3))]
        kept = [pair for pair in zip(ours.strides(), whole.strides(), strict=True) if pair != ((2, 1), (4, 2))]  # gaps
        problems += [f"{name}: strides {found}, not {wanted}" for found, wanted in kept if found != wanted]
        saved, again = ours.optimizer.full_state_dict(), [Side(), Side(sharded, wrap)]
        again[0].module.to(memory_format=torch.contiguous_format)
        for each in again:
            each.module.load_state_dict(ours.module.state_dict())
            each.optimizer.load_state_dict(saved)
        problems += [f"{name}, loaded: {each}" for each in train(world, again[1], again[0], range(3, 5))]
        train(world, ours, whole, range(3, 5))
        problems += [] if torch.allclose(again[0].module.mixed, whole.module.mixed) else [f"{name}: another state"]
    return problems


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_after_any_wrapper_is_that_of_one_process(on_ranks, ranks):
    assert on_ranks(ranks, after_a_wrapper) == [[]] * ranks


def before_a_wrapper(world: World) -> list[str]:
    """Change strides after sharding and before DDP; then write to parameters, and set their data."""
    ours, whole = Side(sharded), Side()
    ours.module.to(memory_format=torch.contiguous_format)
    train(world, Side(sharded), Side(), range(1))
    ours.optimizer.step()
    ours.module.to(memory_format=torch.channels_last)
    ours.run = DistributedDataParallel(ours.module)
    problems = train(world, ours, whole, range(2))
    for each in (ours, whole):
        with torch.no_grad():
            each.module.mixed.mul_(2)
            each.module.conv.weight.data = each.module.conv.weight.data + 1
    return problems + train(world, ours, whole, range(2, 4))


def test_strides_that_change_before_a_wrapper_are_kept(on_ranks):
    assert on_ranks(2, before_a_wrapper) == [[]] * 2
