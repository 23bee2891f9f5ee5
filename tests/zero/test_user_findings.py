"""Problems found in a user trial: valid uses that gave wrong weights, crashed or failed silently."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel

pytestmark = pytest.mark.ranks


@dataclass
class Told:
    """Hides tensors where no search finds them."""

    h: Tensor


class Scaled(nn.Module):
    """A block with a weight used elementwise: reading it when freed would crash the process."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.w = nn.Parameter(torch.full((6,), 0.5))
        self.stats: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x)) * self.w
        self.stats["aux"] = (y * self.w).pow(2).mean()
        return y


class Net(nn.Module):
    """Blocks, with a norm and a head in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale[:2]


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(number: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def pseudo_labels(model: nn.Module, _: Net) -> None:
    y = model(batch(0))
    with torch.no_grad():
        target = model(batch(1))
    (y - target).pow(2).mean().backward()


def two_losses(model: nn.Module, _: Net) -> None:
    first, second = model(batch(0)).mean(), model(batch(1)).pow(2).mean()
    first.backward()
    second.backward()


def evaluated_between(model: nn.Module, _: Net) -> None:
    y = model(batch(0))
    if isinstance(model, ShardedDataParallel):
        with model.gather_full():
            pass
    y.pow(2).mean().backward()


def kept_activations(model: nn.Module, module: Net) -> None:
    (model(batch(0)).pow(2).mean() + sum(block.stats["aux"] for block in module.blocks)).backward()


def hooked_activation(model: nn.Module, module: Net) -> None:
    seen: list[Tensor] = []
    handle = module.blocks[1].register_forward_hook(lambda _, inputs, output: seen.append(output))
    y = model(batch(0))
    handle.remove()
    (seen[0].pow(2).mean() + y.mean()).backward()


USES = (pseudo_labels, two_losses, evaluated_between, kept_activations, hooked_activation)


def worst(found: nn.Module, wanted: nn.Module) -> float:
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


def trained_by(world: World) -> dict[str, float]:
    """Return how far two steps of each use, in each stage, differ from one process."""
    found = {}
    for use in USES:
        alone = net()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            use(alone, alone)
            optimizer.step()
        for stage in (1, 3):
            module = net()
            model = ShardedDataParallel(module, world.group, stage=stage, units=list(module.blocks))
            sharded = model.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
            for _ in range(2):
                sharded.zero_grad()
                use(model, module)
                sharded.step()
            with model.gather_full():
                found[f"{use.__name__}, {stage}"] = worst(module, alone)
    return found


def test_graphs_that_leave_their_units_find_their_parameters(on_ranks):
    for found in on_ranks(2, trained_by):
        assert {name: far for name, far in found.items() if not far < 1e-12} == {}


def two_optimizers(world: World) -> list[float]:
    """Step two optimizers of one model, each with its own zero_grad; return the difference from separate ones."""
    far = []
    alone = net()
    parts = [list(alone.blocks.parameters()), [alone.scale, *alone.head.parameters()]]
    optimizers = [torch.optim.Adam(parts[0], lr=0.01), torch.optim.SGD(parts[1], lr=0.1)]
    train_in_turns(alone, optimizers)
    for stage in (1, 2, 3):
        module = net()
        model = ShardedDataParallel(module, world.group, stage=stage, bucket_size_mb=None)
        mine = [list(module.blocks.parameters()), [module.scale, *module.head.parameters()]]
        train_in_turns(
            model,
            [model.optimizer(torch.optim.Adam, mine[0], lr=0.01), model.optimizer(torch.optim.SGD, mine[1], lr=0.1)],
        )
        with model.gather_full():
            far.append(worst(module, alone))
    return far


def train_in_turns(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    for number in range(3):
        model(batch(number)).pow(2).mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def test_an_optimizer_forgets_its_own_gradients_only(on_ranks):
    for found in on_ranks(2, two_optimizers):
        assert max(found) < 1e-12


def read_after_a_step(world: World) -> list[bool]:
    """Read parameters right after a step in every way; return whether all have their gathered values."""
    module = net()
    model = ShardedDataParallel(module, world.group, stage=2, units=list(module.blocks), bucket_size_mb=0.0)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.5)
    parameters = list(module.parameters())
    ways = {
        "detach": lambda: [each.detach().clone() for each in parameters],
        "data": lambda: [each.data.clone() for each in parameters],
        "foreach": lambda: torch._foreach_mul(parameters, 1.0),
        "copy": lambda: [each.detach() for each in copy.deepcopy(module).parameters()],
        "vector": lambda: [nn.utils.parameters_to_vector(parameters).detach()],
    }
    right = []
    for read in ways.values():
        optimizer.zero_grad()
        model(batch(0)).pow(2).sum().backward()
        for block in module.blocks:
            block.stats.clear()  # tensors with a graph cannot be copied
        optimizer.step()
        found = [each.clone() for each in read()]
        right_class = all(type(each) is nn.Parameter for each in copy.deepcopy(module).parameters())
        model.synchronize()
        right.append(right_class and all(map(torch.equal, found, read())))
    return right


def test_who_reads_parameters_after_a_step_waits_for_them(on_ranks):
    assert on_ranks(3, read_after_a_step) == [[True] * 5] * 3


def refused_uses(world: World) -> list[str]:
    told = []
    for stage in (1, 3):
        module = net()
        model = ShardedDataParallel(module, world.group, stage=stage)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        with model.no_sync():
            model(batch(0)).sum().backward()
        with pytest.raises(RuntimeError) as local:
            optimizer.step()
        told.append(str(local.value))
        with pytest.raises(ValueError, match="assign=True would replace the sharded parameters"):
            model.load_state_dict(net().state_dict(), assign=True)
        with model.gather_full(writes=True):
            zeros = torch.zeros(sum(each.numel() for each in module.parameters()), dtype=torch.float64)
            nn.utils.vector_to_parameters(zeros, module.parameters())
        model.zero_grad()
        model(batch(0)).sum().backward()
        optimizer.step()  # values set within gather_full count, and raise no error
        with model.gather_full():
            told.append(f"{float(module.scale.detach().abs().max()):.1f}")
    return told


def test_gradients_of_one_rank_are_not_left_out_in_silence(on_ranks):
    for first, written, third, again in on_ranks(2, refused_uses):
        assert "has a .grad that was not averaged over ranks" in first
        assert "has a .grad that was not averaged over ranks" in third
        assert (written, again) == ("0.0", "0.0")


class Routed(nn.Module):
    """Blocks of equal size, of which each rank runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, chosen: int) -> Tensor:
        return self.blocks[chosen](x)


def routed(world: World) -> list[str]:
    model = ShardedDataParallel(Routed().double(), world.group, stage=3, find_unused_parameters=True)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model(batch(0), world.rank).sum().backward()
    with pytest.raises(RuntimeError) as refused:
        optimizer.step()
    return [str(refused.value)]


def test_ranks_that_run_other_units_are_told_before_the_step(on_ranks):
    for (said,) in on_ranks(2, routed):
        assert said.startswith("the ranks have run different units, or in different orders: this rank ran blocks.")
