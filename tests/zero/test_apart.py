"""Parameters that share memory are refused by name, because sharding would separate them; others are accepted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster.ddp import BucketedDDP
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, ShardedOptimizer
from muster.zero.apart import require_own_memory

pytestmark = pytest.mark.ranks


class Tied(nn.Module):
    """An embedding, and a head of the same shape."""

    def __init__(self, tie: Callable[["Tied"], None]) -> None:
        super().__init__()
        self.emb = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.emb.weight)
        nn.init.ones_(self.head.weight)
        tie(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.emb(x).sum() + self.head(x).sum()  # the gradient of each weight is x


def by_data(module: Tied) -> None:
    module.head.weight.data = module.emb.weight.data


def by_name(module: Tied) -> None:
    module.head.weight = module.emb.weight


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    model(torch.ones(1, 2)).backward()
    optimizer.step()
    return sorted({round(float(each), 4) for part in model.state_dict().values() for each in part.view(-1)})


def message(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    return str(caught.value)


def tied(world: World) -> dict[str, Any]:
    """Step tied weights of 1, whose gradient is doubled: 1 - 0.1 * 2."""
    found: dict[str, Any] = {}
    model = BucketedDDP(Tied(by_data))
    found["ddp"] = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for stage in (1, 2, 3):
        found[f"refused {stage}"] = message(partial(ShardedDataParallel, Tied(by_data), stage=stage))
        model = ShardedDataParallel(Tied(by_name), stage=stage)
        found[f"named {stage}"] = stepped(model, model.optimizer(torch.optim.SGD, lr=0.1))
    module = Tied(by_data)
    found["optimizer"] = message(lambda: ShardedOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.1))
    found["groups"] = message(
        lambda: ShardedOptimizer([{"params": [each]} for each in module.parameters()], torch.optim.SGD, lr=0.1)
    )
    return found


def test_two_parameters_in_one_memory_are_refused_by_name_and_one_with_two_names_is_not(on_ranks):
    first, second = on_ranks(2, tied)
    assert first == second
    refused = "parameters emb.weight and head.weight share memory"
    assert first.pop("ddp") == [0.8]
    assert [first.pop(f"named {stage}") for stage in (1, 2, 3)] == [[0.8]] * 3
    assert all(first.pop(f"refused {stage}").startswith(refused) for stage in (1, 2, 3))
    assert first["optimizer"].startswith(refused)
    assert first["groups"].startswith("parameters groups[0][0] and groups[1][0] share memory")


def tied_later(world: World) -> list[str]:
    """Tie parameters of a sharded module, in one flat tensor and in two."""
    found = []
    for size_mb in (25.0, 1e-9):
        model = ShardedDataParallel(Tied(lambda _: None), stage=1, bucket_size_mb=size_mb)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 2)).backward()
        by_data(model.module)
        found.append(message(optimizer.step))
    return found


def test_parameters_that_are_tied_after_they_were_sharded_are_refused_by_the_step(on_ranks):
    told = "head.weight: its data was set to the memory of a sharded parameter"
    assert [[each.partition(",")[0] for each in said] for said in on_ranks(2, tied_later)] == [[told] * 2] * 2


def kept(where: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rows = module[1].weight.data[1:3]
    if where == "buffer":
        module.register_buffer("rows", rows)
    else:
        module[0].rows = {"attribute": rows, "dictionary": {"first": [rows]}, "turned": rows.t()}[where]
    return module


@pytest.mark.parametrize("where", ["buffer", "attribute", "dictionary", "turned"])
def test_a_view_of_a_parameter_that_a_module_keeps_is_refused_by_name(where):
    said = message(lambda: require_own_memory(kept(where)))
    assert said.startswith("buffer rows is a view" if where == "buffer" else "attribute 0.rows is a view")
    assert "of parameter 1.weight" in said


def halves() -> nn.Module:
    module, whole = nn.Sequential(nn.Linear(2, 4), nn.Linear(2, 4)), torch.ones(4, 4)
    module[0].weight.data, module[1].weight.data = whole[:, :2], whole[:, 2:]
    return module


def lists() -> nn.Module:
    module = nn.Linear(3, 3)
    module.all = [module.weight, module.bias]  # like cuDNN's recurrent layers
    module.copy = module.weight.detach().clone()
    module.none = module.weight.data[:0]
    return module


def same_memory_no_element(kind: type[nn.Module]) -> nn.Module:
    whole, module = torch.ones(20), kind(2, 2)
    for place, each in enumerate(module.parameters()):
        each.data = whole[4 * place : 4 * place + each.numel()].view_as(each)
    return module


@pytest.mark.parametrize(
    "build",
    [
        lambda: same_memory_no_element(nn.Linear),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: nn.LSTM(3, 3),
        lambda: nn.LazyLinear(3),
        lists,
        halves,
    ],
)
def test_what_shares_no_element_is_left_alone(build):
    require_own_memory(build())
