"""States that ranks share out - DTensors, `muster.zero`, pipelines - restored on other numbers of ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muster.ddp import BucketedDDP
from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.state.state import State
from muster.jobs.world.world import World
from muster.pipe import Pipeline
from muster.pipe.schedules.tables import schedule
from muster.zero import ShardedDataParallel, ShardedOptimizer
from support.sessions import load, save

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Layers whose sizes few numbers of ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 10)
        self.down = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).clone()


def built(world: World, how: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if how == "ddp" and world.size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "bucketed":
        model = BucketedDDP(model)
    elif how == "fsdp":
        mesh = init_device_mesh("cpu", (world.size,))
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
    elif how == "hybrid":  # two copies, each sharded over half of the ranks
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("copy", "shard"))
        fully_shard(model, mesh=mesh)
    elif how.startswith("zero"):
        model = ShardedDataParallel(model, stage=int(how[-1]))
        return model, model.optimizer(torch.optim.AdamW, lr=0.01)
    elif how == "alone":  # a sharded optimizer of a model that every rank has whole
        model = nn.parallel.DistributedDataParallel(model)
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    elif how in ("tp", "tp+fsdp"):
        tensor = 2
        mesh = init_device_mesh("cpu", (world.size // tensor, tensor), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if how == "tp+fsdp":
            fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def full(value: torch.Tensor) -> Any:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().tolist()


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return parameters and the optimizer's state, whole, by name."""
    if isinstance(optimizer, ShardedOptimizer):
        whole = optimizer.full_state_dict()["state"]
        found = {name.removeprefix("module."): full(each) for name, each in model.state_dict().items()}
        for number, name in enumerate(list(found)):
            found |= {f"{name}/{key}": full(each) for key, each in sorted(whole[number].items())}
        return found
    model = getattr(model, "module", model)
    found = {name: full(each) for name, each in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": full(each) for key, each in sorted(optimizer.state[parameter].items())}
    return found


def saves(world: World, how: str, folder: str) -> dict[str, Any]:
    model, optimizer = built(world, how, seed=0)
    state = State({"model": model, "optimizer": optimizer, "note": how})
    state.join(world)
    train(model, optimizer, range(3))
    save(state, world, folder)
    kept = state.parts() is state.parts()
    return {"content": content(model, optimizer), "losses": train(model, optimizer, range(3, 5)), "kept": kept}


def loads(world: World, how: str, folder: str, resave: str | None = None) -> dict[str, Any]:
    model, optimizer = built(world, how, seed=1)
    state = State({"model": model, "optimizer": optimizer, "note": ""})
    state.join(world)
    load(state, folder)
    found = content(model, optimizer)
    if resave is not None:
        save(state, world, resave)
    return {"content": found, "losses": train(model, optimizer, range(3, 5))}


def test_fsdp2_moves_between_numbers_of_ranks_and_to_ddp(on_ranks, tmp_path: Path):
    two, four = str(tmp_path / "two"), str(tmp_path / "four")
    saved = on_ranks(2, saves, how="fsdp", folder=two)[0]
    assert saved["kept"], "parts are listed anew at every save"
    again = on_ranks(2, loads, how="fsdp", folder=two)[0]
    assert again == {"content": saved["content"], "losses": saved["losses"]}
    assert on_ranks(4, loads, how="fsdp", folder=two, resave=four)[0]["content"] == saved["content"]
    assert on_ranks(1, loads, how="fsdp", folder=four)[0]["content"] == saved["content"]
    assert on_ranks(2, loads, how="ddp", folder=four)[0]["content"] == saved["content"]


@pytest.mark.parametrize("how", ["tp+fsdp", "hybrid", "tp"])
def test_meshes_of_two_dimensions_are_saved_once_and_load_anywhere(on_ranks, tmp_path: Path, how):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = on_ranks(2 if how == "tp" else 4, saves, how=how, folder=first)[0]
    assert on_ranks(1, loads, how="ddp", folder=first, resave=second)[0]["content"] == saved["content"]
    again = on_ranks(2 if how == "tp" else 4, loads, how=how, folder=second)[0]
    assert again["content"] == saved["content"]


def placed(world: World, folder: str) -> list[str]:
    """Save and load DTensors of every kind of placement, and be refused partial sums."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    ways = [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Replicate(), Replicate())]
    full_tensors = [torch.arange(35.0).reshape(5, 7) + 100 * number for number in range(len(ways))]
    held = [distribute_tensor(each, mesh, way) for each, way in zip(full_tensors, ways, strict=True)]
    model = nn.ParameterList([nn.Parameter(each) for each in held])
    state = State({"model": model})
    state.join(world)
    save(state, world, folder)
    with torch.no_grad():
        for each in model:
            each.zero_()
    load(state, folder)
    wrong = [
        str(way)
        for way, each, wanted in zip(ways, model, full_tensors, strict=True)
        if not torch.equal(each.full_tensor(), wanted)
    ]
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    try:
        State({"model": nn.ParameterList([nn.Parameter(partial)])}).join(world)
    except RefusedError as error:
        return [*wrong, str(error)]
    return [*wrong, "not refused"]


def test_placements_are_cut_where_pytorch_cuts_and_partial_sums_are_refused(on_ranks, tmp_path: Path):
    for said in on_ranks(4, placed, folder=str(tmp_path / "run")):
        assert len(said) == 1
        assert "state: model/0: a DTensor with the placement P" in said[0]


@pytest.mark.parametrize("how", ["zero1", "zero3", "alone"])
def test_shards_of_zero_move_between_numbers_of_ranks_and_to_and_from_ddp(on_ranks, tmp_path: Path, how):
    two, three, plain = (str(tmp_path / name) for name in ("two", "three", "plain"))
    saved = on_ranks(2, saves, how=how, folder=two)[0]
    assert saved["kept"]
    again = on_ranks(2, loads, how=how, folder=two)[0]
    assert again == {"content": saved["content"], "losses": saved["losses"]}
    assert on_ranks(3, loads, how=how, folder=two, resave=three)[0]["content"] == saved["content"]
    assert on_ranks(2, loads, how="bucketed", folder=three, resave=plain)[0]["content"] == saved["content"]
    assert on_ranks(2, loads, how=how, folder=plain)[0] == again


class Mixed(nn.Module):
    """Parameters of 16 and of 32 bits, a tied one, an empty one, a number, a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(5)
        self.other = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.other.weight = self.first.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.norm(self.first(x.bfloat16()).float()).bfloat16()
        return self.other(hidden).float() * self.scale + self.empty.sum()

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def mixed(world: World, stage: int, load_from: str | None, save_to: str | None) -> dict[str, Any]:
    torch.manual_seed(0 if load_from is None else 1)
    model: Any = Mixed()
    if stage:
        model = ShardedDataParallel(model, stage=stage)
        optimizer: torch.optim.Optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = State({"model": model, "optimizer": optimizer})
    state.join(world)
    if load_from is not None:
        load(state, load_from)
    for number in range(2) if load_from is None else ():
        optimizer.zero_grad()
        (model(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))) - 1).square().mean().backward()
        optimizer.step()
    if save_to is not None:
        save(state, world, save_to)
    found = {name: full(each) for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
    masters = {}
    if isinstance(optimizer, ShardedOptimizer):
        masters = {
            str(number): full(each["master"])
            for number, each in optimizer.full_state_dict()["state"].items()
            if "master" in each
        }
    calls = (model.module if stage else model).calls
    if load_from is not None:
        optimizer.zero_grad()
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()  # with the state that was made for it
    return {"model": found, "calls": calls, "masters": masters}


@pytest.mark.parametrize("stage", [1, 3])
def test_float32_copies_tied_and_empty_parameters_and_extra_states_of_shards_are_restored(on_ranks, tmp_path, stage):
    two, three, plain = (str(tmp_path / name) for name in ("two", "three", "plain"))
    saved = on_ranks(2, mixed, stage=stage, load_from=None, save_to=two)
    assert saved[0]["masters"]
    assert saved[0]["calls"] == 2
    assert on_ranks(2, mixed, stage=stage, load_from=two, save_to=None) == saved
    assert on_ranks(3, mixed, stage=stage, load_from=two, save_to=three)[2] == saved[0]
    (alone,) = on_ranks(1, mixed, stage=0, load_from=three, save_to=plain)
    assert alone == {**saved[0], "masters": {}}
    back = on_ranks(2, mixed, stage=stage, load_from=plain, save_to=None)
    assert [each["model"] for each in back] == 2 * [alone["model"]]


class Layers(nn.Sequential):
    """Layers for a pipeline; the last one has the first one's weight."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        self[3].weight = self[0].weight


def half_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def pipelined(world: World, seed: int, copies: int) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Build a pipeline over all ranks, or over those of this rank's copy; one rank has the plain model."""
    torch.manual_seed(seed)
    model: Any = Layers()
    if world.size == 1:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> float:
            total = 0.0
            for part in x.chunk(2):
                loss = half_square(model(part), part) / 2
                loss.backward()
                total += loss.item()
            return total

        return model, optimizer, step
    per_copy = world.size // copies
    groups = [torch.distributed.new_group(range(at, at + per_copy)) for at in range(0, world.size, per_copy)]
    group = groups[world.rank // per_copy]
    pipeline = Pipeline(model, schedule("1f1b", per_copy, 2), loss=half_square, process_group=group)
    optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=0.01)
    return pipeline, optimizer, lambda x: pipeline.step(x, x).item()


def pipes(
    world: World, load_from: str | None, save_to: str | None, seed: int, copies: int = 1
) -> tuple[dict[str, Any], list[float]]:
    model, optimizer, step = pipelined(world, seed, copies)
    state = State({"model": model, "optimizer": optimizer})
    state.join(world)
    if load_from is not None:
        load(state, load_from)
    losses: list[float] = []

    def go(steps: range) -> None:
        for number in steps:
            optimizer.zero_grad()
            losses.append(step(torch.randn(8, 4, generator=torch.Generator().manual_seed(number))))
            optimizer.step()

    if load_from is None:
        go(range(3))
    if save_to is not None:
        save(state, world, save_to)
    module = model if world.size == 1 else model.module
    found = {name: each.tolist() for name, each in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        found |= {f"{name}/{key}": each.tolist() for key, each in sorted(optimizer.state[parameter].items())}
    losses.clear()
    go(range(3, 5))
    return found, losses


def test_pipelines_and_one_process_read_each_others_checkpoints(on_ranks, tmp_path: Path):
    two, one, four = (str(tmp_path / name) for name in ("two", "one", "four"))
    saved = on_ranks(2, pipes, load_from=None, save_to=two, seed=0)
    assert on_ranks(2, pipes, load_from=two, save_to=None, seed=1) == saved, "goes on bit by bit"
    ((alone, losses),) = on_ranks(1, pipes, load_from=two, save_to=one, seed=2)
    whole = saved[1][0] | saved[0][0]
    assert {name: whole[name] for name in alone} == alone
    assert losses == pytest.approx(saved[0][1])
    copies = on_ranks(4, pipes, load_from=one, save_to=four, seed=3, copies=2)
    assert [found for found, _ in copies] == 2 * [found for found, _ in saved]
    assert on_ranks(2, pipes, load_from=four, save_to=None, seed=4) == saved
