"""A sharded optimizer refuses mistakes with a message, on every rank, before anything is changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from muster.jobs.world.world import World
from muster.zero import ShardedOptimizer
from support.zero_models import Ragged, seeded
from support.zero_optimizer import pair, photograph, refusal, unchanged

pytestmark = pytest.mark.ranks

SGD = torch.optim.SGD
TYPES = [torch.float32, torch.float64]


class Own(SGD):
    """Has its own step."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each -= group["lr"] * each.grad.sign()


class Elementwise(Own):
    """The same, marked as element-wise."""

    elementwise = True


class Inherited(SGD):
    """Inherits the step of SGD."""


Build = Callable[[nn.Module, int], object]


def parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())


REFUSED: dict[str, tuple[Build, str]] = {
    **{
        kind.__name__: (lambda module, rank, kind=kind: ShardedOptimizer(module.parameters(), kind), why)
        for kind, why in (
            (torch.optim.LBFGS, "LBFGS cannot step shards: it computes products of all gradients"),
            (torch.optim.Adafactor, "it factors the second moment of a matrix into its rows and columns"),
            (torch.optim.Muon, "it orthogonalizes the momentum of a whole matrix"),
            (torch.optim.SparseAdam, "but shards of gradients are dense"),
            (Own, "Own has its own step, which may need whole tensors"),
            (nn.Linear, "must be a class of torch.optim.Optimizer"),
        )
    },
    "an optimizer for its class": (
        lambda module, rank: ShardedOptimizer(module.parameters(), SGD(module.parameters(), lr=0.1)),
        "pass the class itself",
    ),
    "none": (lambda module, rank: ShardedOptimizer([], SGD, lr=0.1), "empty parameter list"),
    "none on one rank": (
        lambda module, rank: ShardedOptimizer([] if rank == 1 else module.parameters(), SGD, lr=0.1),
        "empty parameter list",
    ),
    "wrong keyword": (lambda module, rank: ShardedOptimizer(module.parameters(), SGD, betas=(0, 1)), "betas"),
    "wrong value": (lambda module, rank: ShardedOptimizer(module.parameters(), SGD, lr=-1.0), "Invalid learning rate"),
    "wrong value on one rank": (
        lambda module, rank: ShardedOptimizer(module.parameters(), SGD, lr=-1.0 if rank == 1 else 1.0),
        "Invalid learning rate",
    ),
    "twice": (
        lambda module, rank: ShardedOptimizer([*parameters(module), parameters(module)[2]], SGD),
        "parameters 2 and 8 of a group are the same",
    ),
    "in two groups": (
        lambda module, rank: ShardedOptimizer([{"params": parameters(module)[:each]} for each in (8, 1)], SGD),
        "some parameters appear in more than one parameter group",
    ),
    "no tensors": (lambda module, rank: ShardedOptimizer(["weight"], SGD), "optimizer can only optimize Tensors"),
    "a set": (lambda module, rank: ShardedOptimizer([{"params": set(parameters(module))}], SGD), "ordered collections"),
    "fewer on one rank": (
        lambda module, rank: ShardedOptimizer(parameters(module)[: 8 - rank], SGD),
        "parameter groups[0][7] (15,) torch.float32 on rank 0",
    ),
    "another order": (
        lambda module, rank: ShardedOptimizer(parameters(module)[:: 1 - 2 * rank], SGD),
        "pass the same ones in the same order on every rank",
    ),
    "another shape": (
        lambda module, rank: ShardedOptimizer([nn.Parameter(torch.zeros(3 + rank))], SGD),
        "parameter groups[0][0] (3,) torch.float32 on rank 0",
    ),
    "another type": (
        lambda module, rank: ShardedOptimizer([nn.Parameter(torch.zeros(3, dtype=TYPES[rank]))], SGD),
        "torch.float32 on rank 0",
    ),
    "more groups on one rank": (
        lambda module, rank: ShardedOptimizer([{"params": [each]} for each in parameters(module)[: 2 + rank]], SGD),
        "nothing more on rank 0",
    ),
    "sparse": (
        lambda module, rank: ShardedOptimizer([*parameters(module), nn.Parameter(torch.eye(3).to_sparse())], SGD),
        "parameter 'groups[0][8]' is torch.sparse_coo, expected a dense tensor",
    ),
    "expanded": (
        lambda module, rank: ShardedOptimizer([nn.Parameter(torch.ones(1).expand(3))], SGD),
        "parameter 'groups[0][0]' has elements that share memory",
    ),
    "another setting": (
        lambda module, rank: ShardedOptimizer([{"params": parameters(module), "lr": 0.1 + rank}], SGD),
        "lr=0.1, maximize=False",
    ),
}  # fmt: skip


def refusals(world: World) -> dict[str, list[Any]]:
    """Build invalid optimizers; return the errors, and whether parameters are unchanged."""
    module = seeded(Ragged)
    said = {}
    for name, (build, _) in REFUSED.items():
        before = [(each.data_ptr(), each.detach().clone()) for each in module.parameters()]
        text = refusal(world, lambda build=build: build(module, world.rank))
        same = all(
            each.data_ptr() == where and torch.equal(each, what)
            for each, (where, what) in zip(module.parameters(), before, strict=True)
        )
        said[name] = [text, same]
    return said


def test_what_cannot_be_sharded_is_refused_on_every_rank(on_ranks):
    for said in on_ranks(2, refusals):
        for name, (text, is_same) in said.items():
            assert REFUSED[name][1] in text, name
            assert "\n" not in text, name
            assert is_same, name


def accepted(world: World) -> list[str]:
    """Build valid optimizers that are not torch's own."""
    problems = []
    for kind in (Elementwise, Inherited):
        module, twin = seeded(Ragged), seeded(Ragged)
        optimizer, reference = ShardedOptimizer(module.parameters(), kind, lr=0.1), kind(twin.parameters(), lr=0.1)
        for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
            mine.grad, other.grad = torch.ones_like(mine), torch.ones_like(other)
        optimizer.step()
        reference.step()
        pairs = zip(module.named_parameters(), twin.parameters(), strict=True)
        problems += [f"{kind.__name__}: {name}" for (name, mine), other in pairs if not torch.equal(mine, other)]
    return problems


def test_a_class_of_one_s_own_that_is_elementwise_is_sharded(on_ranks):
    assert on_ranks(2, accepted) == [[]] * 2


def grow(made: Any) -> None:
    made.module.up.bias.data = torch.zeros(16)


def convert(made: Any) -> None:
    made.module.double()


def thin_out(made: Any) -> None:
    made.module.up.weight.grad = made.module.up.weight.grad.to_sparse()


def changes(world: World) -> list[list[Any]]:
    """Change parameters after they were sharded; return the error of the step, and whether it has stepped."""
    said = []
    for change in (grow, convert, thin_out):
        made = pair("adamw")
        made.draw(0)
        made.step()
        made.draw(1)
        change(made)
        before = photograph(made)
        text = refusal(world, made.optimizer.step)
        said.append([text, unchanged(made, before)])
    return said


def test_parameters_that_change_after_they_were_sharded_are_named(on_ranks):
    for grown, converted, sparse in on_ranks(2, changes):
        wanted = "RuntimeError: groups[0][7] is [16] torch.float32 on cpu, but was [15] torch.float32 on cpu when"
        assert grown[0].startswith(wanted)
        assert "is [] torch.float64 on cpu, but was [] torch.float32 on cpu" in converted[0]
        assert sparse[0].startswith("RuntimeError: groups[0][6]: its gradient is sparse")
        assert [grown[1], converted[1], sparse[1]] == [True] * 3


def late_groups(world: World) -> list[Any]:
    """Add invalid groups; the optimizer continues unchanged."""
    made = pair("adamw")
    new = nn.Parameter(torch.ones(3 + world.rank))
    said = [
        refusal(world, lambda: made.optimizer.add_param_group({"params": [new]})),
        refusal(world, lambda: made.optimizer.add_param_group({"params": [made.module.two] if world.rank else []})),
        refusal(world, lambda: made.optimizer.add_param_group({"params": [], "lr": 1.0 + world.rank})),
    ]
    made.draw(0)
    made.step()
    return [said, len(made.optimizer.param_groups), made.apart()]


def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was(on_ranks):
    for (shapes, twice, settings), groups, problems in on_ranks(2, late_groups):
        assert "parameter groups[1][0] (3,) torch.float32 on rank 0" in shapes
        assert "more than one parameter group" in twice
        assert "lr=1.0" in settings
        assert groups == 1
        assert problems == []


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(ValueError, match="no process group is initialized: call torch"):
        ShardedOptimizer(nn.Linear(2, 2).parameters(), SGD)
