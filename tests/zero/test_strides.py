"""Parameters that are not row-major keep their strides in a `ShardedOptimizer`, because DDP relies on them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muster.ddp import AllReduce, BucketedDDP
from muster.jobs.world.world import World
from muster.zero import ShardedOptimizer

pytestmark = pytest.mark.ranks

STEPS = 4
Wrap = Callable[[nn.Module], Any]

WRAPS: dict[str, Wrap] = {
    "torch": DistributedDataParallel,
    "torch, views": lambda module: DistributedDataParallel(module, gradient_as_bucket_view=True),
    "torch, static": lambda module: DistributedDataParallel(module, static_graph=True),
    "torch, small buckets": lambda module: DistributedDataParallel(module, bucket_cap_mb=0.0001),
    "bucketed": BucketedDDP,
    "all-reduce": AllReduce,
}


class Images(nn.Module):
    """Parameters that are row-major, channels last, transposed or permuted, have gaps, or have one element."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.small = nn.Conv2d(5, 4, 1)
        self.mixed = nn.Parameter(torch.randn(6, 4).t())  # (4, 6), strides (1, 4)
        self.permuted = nn.Parameter(torch.randn(2, 3, 6).permute(2, 0, 1))
        self.gaps = nn.Parameter(torch.randn(6, 4)[:, ::2])
        self.number = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, 5, 5) to (batch, 2, 3)."""
        hidden = torch.tanh(self.small(self.conv(x))).mean((2, 3)) @ self.mixed
        hidden = hidden + (hidden @ self.gaps) @ self.gaps.t() * self.number
        return torch.einsum("bi,ijk->bjk", hidden, self.permuted)


def images(dtype: torch.dtype = torch.float64, *, last: bool = True) -> nn.Module:
    torch.manual_seed(0)
    module = Images().to(dtype)
    return module.to(memory_format=torch.channels_last) if last else module


def loss_of(model: nn.Module, number: int) -> Tensor:
    like = next(model.parameters())
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(number)).to(like.dtype)
    return model(x).pow(2).mean()


def strides_of(module: nn.Module) -> dict[str, Any]:
    return {name: each.stride() for name, each in module.named_parameters()}


def apart(module: nn.Module, twin: nn.Module) -> list[str]:
    pairs = zip(module.named_parameters(), twin.parameters(), strict=True)
    return [name for (name, each), other in pairs if not torch.allclose(each, other, rtol=1e-12, atol=1e-12)]


def trained(world: World, run: Any, optimizer: Any, twin: nn.Module, reference: Any, steps: range) -> None:
    """Train with one micro-batch per rank, and its twin with all of them in one process."""
    for step in steps:
        keep = step % 2 == 1  # every other step zeroes the gradients in place
        optimizer.zero_grad(set_to_none=not keep)
        reference.zero_grad(set_to_none=not keep)
        loss_of(run, step * world.size + world.rank).backward()
        if hasattr(run, "finish_gradient_synchronization"):
            run.finish_gradient_synchronization()
        for rank in range(world.size):
            (loss_of(twin, step * world.size + rank) / world.size).backward()
        if step == 2:
            norms = [float(optimizer.clip_grad_norm_(0.01)), float(nn.utils.clip_grad_norm_(twin.parameters(), 0.01))]
            assert norms[0] == pytest.approx(norms[1])
        optimizer.step()
        reference.step()


def after_a_wrapper(world: World) -> list[str]:
    problems = []
    for name, wrap in WRAPS.items():
        module, twin = images(), images()
        wanted, run = strides_of(module), wrap(module)
        optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=0.05)
        reference = torch.optim.AdamW(twin.parameters(), lr=0.05)
        trained(world, run, optimizer, twin, reference, range(STEPS))
        problems += [f"{name}: {each} is another" for each in apart(module, twin)]
        wanted["gaps"] = (2, 1)  # parameters with gaps become row-major, as DDP lays out their gradients
        problems += [] if strides_of(module) == wanted else [f"{name}: strides {strides_of(module)}"]
    return problems


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_after_any_wrapper_is_that_of_one_process(on_ranks, ranks):
    assert on_ranks(ranks, after_a_wrapper) == [[]] * ranks


def before_a_wrapper(world: World) -> list[str]:
    """Change strides after sharding and before DDP; then write to parameters, and set their data."""
    module, twin = images(last=False), images(last=False)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=0.05)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.05)
    module.to(memory_format=torch.channels_last)
    wanted, run = strides_of(module), DistributedDataParallel(module)
    trained(world, run, optimizer, twin, reference, range(2))
    for each in (module, twin):
        with torch.no_grad():
            each.mixed.mul_(2)
            each.conv.weight.data = each.conv.weight.data + 1
    trained(world, run, optimizer, twin, reference, range(2, STEPS))
    return apart(module, twin) + ([] if strides_of(module) == wanted else [f"strides {strides_of(module)}"])


def test_strides_that_change_before_a_wrapper_are_kept(on_ranks):
    assert on_ranks(2, before_a_wrapper) == [[]] * 2


def with_masters(world: World) -> list[str]:
    """Step bfloat16 parameters in float32: the same bits as masters of row-major parameters."""
    modules = [images(torch.bfloat16, last=last) for last in (True, False)]
    modules[1].mixed.data = modules[1].mixed.data.contiguous()
    modules[1].permuted.data = modules[1].permuted.data.contiguous()
    optimizers = [ShardedOptimizer(each.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9) for each in modules]
    for step in range(3):
        for module, optimizer in zip(modules, optimizers, strict=True):
            for place, each in enumerate(module.parameters()):
                drawn = torch.randn(each.shape, generator=torch.Generator().manual_seed(10 * step + place))
                each.grad = torch.empty_like(each).copy_(drawn)
            optimizer.step()
    states = [each.full_state_dict()["state"] for each in optimizers]
    problems = [
        f"{key} of {number}"
        for number, kept in states[0].items()
        for key, value in kept.items()
        if not torch.equal(value, states[1][number][key])
    ]
    return problems + apart(*modules)


def test_masters_are_those_of_row_major_parameters(on_ranks):
    assert on_ranks(2, with_masters) == [[]] * 2


def saved(world: World, path: str) -> None:
    module, twin = images(), images()
    run = DistributedDataParallel(module)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=0.05)
    trained(world, run, optimizer, twin, torch.optim.AdamW(twin.parameters(), lr=0.05), range(2))
    whole = optimizer.full_state_dict()
    if world.rank == 0:
        torch.save({"model": module.state_dict(), "optimizer": whole}, path)


def loaded(world: World, path: str) -> list[str]:
    """Load into parameters with these and other strides, sharded and not; all must continue alike."""
    read = torch.load(path, weights_only=True)
    twin = images(last=False)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.05)
    twin.load_state_dict(read["model"])
    reference.load_state_dict(copy.deepcopy(read["optimizer"]))
    module = images()
    run = DistributedDataParallel(module)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=0.05)
    module.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    trained(world, run, optimizer, twin, reference, range(2, STEPS))
    return apart(module, twin)


def test_a_saved_state_is_that_of_the_logical_parameters(on_ranks, tmp_path):
    path = str(tmp_path / "saved.pt")
    on_ranks(2, saved, path=path)
    assert on_ranks(3, loaded, path=path) == [[]] * 3
