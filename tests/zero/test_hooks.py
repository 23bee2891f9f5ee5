"""Compiled modules in ZeRO: the same training as without, with all waits outside of compiled code."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel

pytestmark = pytest.mark.ranks
BLOCKS = 10  # more than the limit of recompilations
WAYS = ("whole", "both", "wrapped", "late", "late blocks", "the wrapper")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head with the same weight."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(12, 6), nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compile_at(way: str, net: Net, *, late: bool) -> nn.Module:
    """Compile a module or its blocks, before it is wrapped or `late`."""
    options = {"backend": "aot_eager"}
    if way in (("late",) if late else ("whole", "both")):
        net.compile(**options)
    for block in net.blocks if way in (("late blocks",) if late else ("blocks", "both")) else ():
        block.compile(**options)
    return torch.compile(net, **options) if way == "wrapped" and not late else net


def losses(world: World, stage: int, way: str, blocks: int) -> Iterator[float]:
    """Train; yield the losses of three steps, and the sum of the outputs without gradients."""
    torch.manual_seed(1)
    net = Net(blocks)
    units = list(net.blocks)
    wrapper = ShardedDataParallel(compile_at(way, net, late=False), world.group, stage=stage, units=units)
    optimizer = wrapper.optimizer(torch.optim.AdamW, lr=1e-2)
    compile_at(way, net, late=True)
    traced: list[bool] = []
    wrapper.on_wait = lambda waits: traced.append(torch.compiler.is_compiling())
    call: Any = torch.compile(wrapper, backend="aot_eager") if way == "the wrapper" else wrapper
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        ids = torch.randint(0, 12, (2, 5), generator=generator)
        loss = nn.functional.cross_entropy(call(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        yield loss.item()
    with torch.no_grad():
        yield call(ids).sum().item()
    assert traced, "no wait was told"
    assert not any(traced), "a wait was traced"
    assert "head.weight" in {name.replace("_orig_mod.", "") for name in wrapper.state_dict()}


def of_ways(world: World, stage: int, ways: list[str], blocks: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # the compiler itself reads what torch warns of
    found: dict[str, Any] = {}
    for way in ways:
        torch._dynamo.reset()
        counters.clear()
        found[way] = list(losses(world, stage, way, blocks))
    found["breaks"] = sum(counters["graph_break"].values())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_compiled_module_trains_as_a_plain_one(on_ranks, stage):
    for found in on_ranks(2, of_ways, stage=stage, ways=["plain", *WAYS], blocks=1, deadline_s=300.0):
        for way in WAYS:
            assert found[way] == pytest.approx(found["plain"], rel=1e-5), way


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_blocks_stay_whole(on_ranks, stage):
    for found in on_ranks(2, of_ways, stage=stage, ways=["plain", "blocks"], blocks=BLOCKS):
        assert found["blocks"] == pytest.approx(found["plain"], rel=1e-5)
        assert found["breaks"] == 0
