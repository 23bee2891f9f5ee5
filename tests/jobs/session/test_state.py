"""States of replicated models: saved by some ranks, restored by others, and everything that is refused by name."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from muster.jobs.checkpoint.export import export
from muster.jobs.checkpoint.manifest import read_manifest
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.session.state import State
from muster.jobs.world.world import World
from support.sessions import load, save

ALONE = World(0, 1, None, torch.device("cpu"))


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
