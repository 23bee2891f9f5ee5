"""States of replicated models: saved by some ranks, restored by others, and everything that is refused by name."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muster.jobs.checkpoint.export import export
from muster.jobs.checkpoint.manifest import read_manifest
from muster.jobs.checkpoint.verify import verify
from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.policy import PlainPolicy
from muster.jobs.saving.saver import Saver, Target
from muster.jobs.saving.schedule import SaveSchedule
from muster.jobs.session.state.state import State
from muster.jobs.tensors.parts import TensorPart
from muster.jobs.tensors.snapshot import MemorySnapshot
from muster.jobs.world.world import World
from support.sessions import ALONE, load, restore, save, store


class Net(nn.Module):
    """Batch norm, a tied weight, a frozen parameter, dropout and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 9)
        self.norm = nn.BatchNorm1d(9)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(9, 4)
        self.tied = nn.Linear(9, 4)
        self.tied.weight = self.down.weight
        self.down.bias.requires_grad_(False)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.drop(self.norm(self.up(x)))
        return self.down(hidden) + self.tied(hidden)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Loop:
    """A user's loop: a model, an optimizer, a scheduler, plain values."""

    def __init__(self, world: World, seed: int, *, ddp: bool = False, **more: object) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.model = DistributedDataParallel(self.net) if ddp else self.net
        trained = [each for each in self.net.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = State({**objects, "best": float("inf"), **more})
        self.state.join(world, world.device)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(8, 4)
            self.optimizer.zero_grad()
            loss = (self.model(x) - x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        self.state.best = min(losses)
        return losses

    def content(self) -> dict[str, Any]:
        """Return parameters, buffers and the optimizer's state, comparable."""
        tensors = dict(self.net.state_dict())
        extra = tensors.pop("_extra_state")
        found = {name: each.tolist() for name, each in tensors.items()}
        state = self.optimizer.state_dict()
        return {"model": found, "extra": extra, "optimizer": plain(state), "scheduler": self.scheduler.state_dict()}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def save_some(world: World, folder: str, steps: int, **how: Any) -> dict[str, Any]:
    loop = Loop(world, 1, ddp=world.size > 1, **how)
    torch.manual_seed(world.rank)
    loop.train(steps)
    save(loop.state, world, folder)
    losses = loop.train(2)
    return {"losses": losses, "best": loop.state.best}


def load_some(world: World, folder: str, resave: str | None = None) -> dict[str, Any]:
    loop = Loop(world, 2 if world.size == 1 else 3, ddp=world.size > 1)
    address = loop.net.up.weight.data_ptr()
    load(loop.state, folder)
    assert loop.net.up.weight.data_ptr() == address, "filled in place"
    content = loop.content()
    if resave is not None:
        save(loop.state, world, resave)
    return {"content": content, "notes": loop.state.notes, "losses": loop.train(2), "best": loop.state.best}


@pytest.mark.slow
def test_ddp_of_two_ranks_goes_on_bit_by_bit_and_loads_on_one_and_on_three(on_ranks, tmp_path: Path):
    first, one = str(tmp_path / "first"), str(tmp_path / "one")
    saved = on_ranks(2, save_some, folder=first, steps=3)
    again = on_ranks(2, load_some, folder=first)
    assert [each["losses"] for each in again] == [each["losses"] for each in saved]
    assert all(each["notes"] == [] for each in again)
    (alone,) = on_ranks(1, load_some, folder=first, resave=one)
    assert "generators are not restored" in alone["notes"][0]
    assert alone["content"] == again[0]["content"]
    three = on_ranks(3, load_some, folder=one)
    assert all(each["content"] == alone["content"] for each in three)


def test_names_are_those_of_the_plain_model_and_export_gives_a_state_dict(tmp_path: Path):
    loop = Loop(ALONE, 0)
    loop.train(1)
    meta = save(loop.state, ALONE, str(tmp_path / "run"))
    folder = RunDir(tmp_path / "run").checkpoint(1, 0)
    manifest = read_manifest(folder)
    assert {"model/up.weight", "model/norm.running_mean", "optimizer/up.weight/exp_avg"} <= manifest.tensors.keys()
    assert "model/tied.weight" not in manifest.tensors
    assert meta["aliases"] == {"tied.weight": "down.weight"}
    export(folder, manifest, tmp_path / "model.safetensors")
    from safetensors.torch import load_file

    plain_model = load_file(tmp_path / "model.safetensors")
    assert torch.equal(plain_model["tied.weight"], loop.net.down.weight)
    assert plain_model.keys() == loop.net.state_dict().keys() - {"_extra_state"}


def test_parts_are_listed_anew_only_when_something_moves():
    loop = Loop(ALONE, 0)
    before = loop.state.parts()
    assert loop.state.parts() is before
    loop.train(1)
    after = loop.state.parts()
    assert after is not before
    assert loop.state.parts() is after
    loop.net.norm.running_mean = loop.net.norm.running_mean.clone()
    moved = loop.state.parts()
    assert moved is not after
    assert [part.piece for part in moved] == [part.piece for part in after]


def test_one_process_goes_on_bit_by_bit_with_its_random_numbers(tmp_path: Path):
    loop = Loop(ALONE, 0)
    loop.train(2)
    save(loop.state, ALONE, str(tmp_path / "run"))
    wanted = (loop.train(3), random.random(), torch.rand(1).item())
    fresh = Loop(ALONE, 5)
    load(fresh.state, str(tmp_path / "run"))
    assert (fresh.train(3), random.random(), torch.rand(1).item()) == wanted


class Memory:
    """A user's object with tensors of its own, a list that grows, and an array."""

    def __init__(self) -> None:
        self.window = torch.zeros(5)
        self.rows: list[torch.Tensor] = []
        self.table = np.zeros((20, 30))

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window, "rows": list(self.rows), "table": self.table, 1: torch.ones(1), "1": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.window, self.rows, self.table = state["window"], state["rows"], state["table"]


def test_averages_scalers_compiled_models_and_objects_with_tensors_are_restored(tmp_path: Path):
    def make() -> dict[str, Any]:
        model = Net()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        average = torch.optim.swa_utils.AveragedModel(model)
        inner = torch.compile(nn.Linear(2, 2), backend="eager")
        compiled = torch.compile(nn.Sequential(nn.Linear(2, 2), inner), backend="eager")
        return {"model": model, "ema": average, "scaler": scaler, "memory": Memory(), "compiled": compiled}

    objects = make()
    memory = objects["memory"]
    memory.window += 3
    memory.rows = [torch.arange(3), torch.zeros((), dtype=torch.bool)]
    memory.table[3, 4] = np.inf
    objects["ema"].update_parameters(objects["model"])
    state = store(tmp_path / "run", **objects, tensor=torch.arange(4.0))
    names = {part.piece.name for part in state.parts()}
    assert {"compiled/0.weight", "compiled/1.weight", "ema/module.up.weight", "memory/rows/0", "tensor"} <= names

    fresh = make()
    window, tensor = fresh["memory"].window, torch.zeros(4)
    fresh["scaler"]._init_scale = 2.0
    resumed = restore(tmp_path / "run", **fresh, tensor=tensor)
    restored = fresh["memory"]
    assert restored.window is window, "read in place"
    assert window.tolist() == [3.0] * 5
    assert (resumed.tensor is tensor, tensor.tolist()) == (True, [0.0, 1.0, 2.0, 3.0])
    assert [each.tolist() for each in restored.rows] == [[0, 1, 2], False]
    assert np.array_equal(restored.table, memory.table)
    assert fresh["scaler"].get_scale() == 256.0
    for key in ("model", "ema", "compiled"):
        theirs, mine = objects[key].state_dict(), fresh[key].state_dict()
        assert plain(theirs) == plain(mine)


def channels_last(world: World, folder: str) -> list[bool]:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    state = State({"model": model})
    state.join(world)
    state.parts()
    with torch.no_grad():
        model.weight.add_(1)
    wanted = model.weight.clone()
    save(state, world, folder)
    with torch.no_grad():
        model.weight.zero_()
    load(state, folder)
    return [torch.equal(model.weight, wanted), model.weight.is_contiguous(memory_format=torch.channels_last)]


@pytest.mark.slow
def test_tensors_that_are_not_row_major_are_saved_as_they_are_now(on_ranks, tmp_path: Path):
    assert on_ranks(2, channels_last, folder=str(tmp_path / "run")) == [[True, True]] * 2


def save_beside(world: World, folder: str) -> list[str]:
    """Train and save with the real writer process; load what was saved last in a fresh loop."""
    run = RunDir(Path(folder))
    run.attempt(0).path.mkdir(parents=True, exist_ok=True)
    loop = Loop(world, 0, ddp=True)
    loop.train(1)
    policy = PlainPolicy(every_steps=1)
    saver: Saver[TensorPart] = Saver(
        Target(run, 0),
        policy,
        loop.state.parts,
        lambda parts: MemorySnapshot(parts, world.device),
        world,
        SaveSchedule(policy, 0),
        lambda done, parent, losses: {"step": done, "parent": parent, "losses": [], **loop.state.meta()},
        Reporter({}),
    )
    saver.finish(1, [])
    wanted = loop.content()
    fresh = Loop(world, 7, ddp=True)
    load(fresh.state, folder)
    assert fresh.content() == wanted
    verify(run.checkpoint(1, 0))
    return fresh.state.notes


@pytest.mark.slow
def test_the_writer_process_saves_a_state(on_ranks, tmp_path: Path):
    assert on_ranks(2, save_beside, folder=str(tmp_path / "run")) == [[], []]


class Adapter(nn.Module):
    """A module that stores a part of itself, and a copy, by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2)
        self.adapter = nn.Linear(2, 2)
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"adapter": self.adapter.weight.detach(), "calls": torch.tensor(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        self.calls = int(state["calls"])


def test_a_module_with_a_state_dict_of_its_own_is_stored_by_it(tmp_path: Path):
    model, fresh = Adapter(), Adapter()
    model.calls = 3
    optimizers = [torch.optim.SGD(each.adapter.parameters(), lr=0.1, momentum=0.9) for each in (model, fresh)]
    model.adapter(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    store(tmp_path / "run", model=model, optimizer=optimizers[0])
    restore(tmp_path / "run", model=fresh, optimizer=optimizers[1])
    assert fresh.calls == 3
    assert torch.equal(fresh.adapter.weight, model.adapter.weight), "in place, although the loader does not copy it"
    assert not torch.equal(fresh.frozen.weight, model.frozen.weight)
    assert plain(optimizers[1].state_dict()) == plain(optimizers[0].state_dict())
