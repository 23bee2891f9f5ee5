"""unwrap() returns the module whole, with its own memory and without hooks, for any further use."""

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from support.refusals import said_by

pytestmark = pytest.mark.ranks

LR = 0.1
GONE = "was unwrapped"
STAGES = (1, 2, 3)


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.BatchNorm1d(3)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Run a step with the same batch on all ranks, so that the mean equals one process."""
    loss = model(batch(step, next(iter(model.state_dict().values())).dtype)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def wrong(world: World, stage: int) -> list[str]:
    """Run a sharded step, one without a wrapper on every rank, and a sharded one again: all equal one process."""
    plain, module = net(), net()
    alone = torch.optim.SGD(plain.parameters(), lr=LR)
    model = ShardedDataParallel(module, world.group, stage=stage)
    optimizer = model.optimizer(torch.optim.SGD, lr=LR)
    train(model, optimizer, 0)
    problems = [] if model.unwrap() is module else ["another module"]
    uses = {"forward": lambda: model(batch(1)), "step": optimizer.step, "again": model.unwrap}
    problems += [f"{name} is not refused" for name, use in uses.items() if GONE not in said_by(use, RuntimeError)]
    kept = [name for name, part in module.named_modules() if part._forward_hooks or part._forward_pre_hooks]
    problems += [f"hooks are left on {kept}"] if kept else []
    storages = {each.untyped_storage()._cdata for each in module.parameters()}
    problems += [] if len(storages) == len(list(module.parameters())) else ["parameters share memory"]
    problems += [
        name for name, each in module.named_parameters() if type(each) is not nn.Parameter or each.grad is not None
    ]
    train(module, torch.optim.SGD(module.parameters(), lr=LR), 1)
    again = ShardedDataParallel(module, world.group, stage=stage)
    train(again, again.optimizer(torch.optim.SGD, lr=LR), 2)
    again.unwrap()
    for step in range(3):
        train(plain, alone, step)
    for (name, found), wanted in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
        problems += [] if torch.allclose(found, wanted, rtol=1e-12, atol=1e-13) else [f"{name} is wrong"]
    return problems


def frozen_later(world: World, stage: int) -> list[str]:
    """Freeze a layer after wrapping: the wrapper refuses to continue, and returns the module to be wrapped again."""
    plain, module = net(), net()
    model = ShardedDataParallel(module, world.group, stage=stage)
    with model.gather_full():
        module[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"0\.bias, 0\.weight: changed after .* back with unwrap\(\)"):
        model(batch(0))
    again = ShardedDataParallel(model.unwrap(), world.group, stage=stage)
    train(again, again.optimizer(torch.optim.SGD, lr=LR), 0)
    plain[0].requires_grad_(False)
    train(plain, torch.optim.SGD(plain.parameters(), lr=LR), 0)
    wanted = plain.state_dict()
    return [name for name, found in again.state_dict().items() if not torch.allclose(found, wanted[name])]


def all_wrong(world: World) -> list[str]:
    problems = [f"stage {stage}: {each}" for stage in STAGES for each in wrong(world, stage)]
    problems += [f"stage {stage}, frozen: {each}" for stage in STAGES for each in frozen_later(world, stage)]
    return problems + rounded(world)


def rounded(world: World) -> list[str]:
    """16-bit parameters are returned as their rounded masters."""
    model = ShardedDataParallel(net(torch.bfloat16), world.group, stage=3)
    train(model, model.optimizer(torch.optim.SGD, lr=LR), 0)
    wanted = model.state_dict()
    found = model.unwrap().state_dict()
    return [f"16 bits: {name}" for name, each in wanted.items() if not torch.equal(found[name], each)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_module_that_is_given_back_trains_on_and_can_be_sharded_again(on_ranks, ranks):
    assert on_ranks(ranks, all_wrong) == [[]] * ranks
