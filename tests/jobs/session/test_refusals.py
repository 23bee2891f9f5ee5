"""What a state refuses, by name, on every rank, before the first step."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.state.state import State
from muster.jobs.world.world import World
from support.sessions import restore, store


class Holder:
    """An object with any state."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, held: dict[str, Any]) -> None:
        self.held = held


class OnlySaves:
    def state_dict(self) -> dict[str, Any]:
        return {}


def sgd(**how: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, **how)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "function": (lambda: {"f": print}, "state: f: a function cannot be stored"),
    "lambda": (
        lambda: {"o": Holder(deep=[{"f": lambda: 0}])},
        "state: o/deep/0/f: a function cannot be stored; leave it out of state_dict()",
    ),
    "class": (lambda: {"model": nn.Linear}, "state: model is the class Linear; register an instance of it"),
    "only saves": (lambda: {"o": OnlySaves()}, "state: o: a OnlySaves has no load_state_dict(), so it cannot be"),
    "sparse": (lambda: {"o": Holder(s=torch.eye(3).to_sparse())}, "state: o/s: a sparse tensor (torch.sparse_coo)"),
    "meta": (lambda: {"model": nn.Linear(2, 2, device="meta")}, "state: model/weight: a tensor on the meta device"),
    "dtype": (lambda: {"o": Holder(c=torch.zeros(2, dtype=torch.complex64))}, "state: o/c: torch.complex64 cannot"),
    "quantized": (
        lambda: {"o": Holder(q=torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8))},
        "state: o/q: a quantized tensor cannot be stored",
    ),
    "lazy": (lambda: {"model": nn.LazyLinear(3)}, "state: model/weight: has no shape before the first forward"),
    "taken": (lambda: {"parts": 3}, "state: 'parts' cannot be the name of an object"),
    "list": (lambda: {"models": [nn.Linear(2, 2)]}, "state: models/0: a value of type Linear cannot be stored"),
}


@pytest.mark.filterwarnings("ignore")  # of lazy modules, and of quantized tensors
@pytest.mark.parametrize("name", REFUSED)
def test_a_state_that_cannot_be_stored_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(RefusedError) as refused:
        State(make())
    assert message in str(refused.value)
    assert refused.value.exit_code == 78


def test_plain_values_are_attributes_and_unknown_names_are_told():
    state = State({"model": nn.Linear(1, 1), "best": 0.5, "seen": {"a": [1]}})
    state.best = 0.25
    assert (state.best, state.seen, type(state.model)) == (0.25, {"a": [1]}, nn.Linear)
    with pytest.raises(AttributeError, match="the state has no 'beast'; it has model, best, seen"):
        print(state.beast)
    with pytest.raises(AttributeError, match=r"state.beast cannot be set: it was not given .* are: best, seen"):
        state.beast = 1
    with pytest.raises(AttributeError, match=r"state.model cannot be set: it is an object"):
        state.model = nn.Linear(1, 1)


STEPPED = sgd(momentum=0.9)
STEPPED.param_groups[0]["params"][0].grad = torch.ones(2)
STEPPED.step()
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": ({"a": 1}, {"b": 1}, "state: a is in the checkpoint, but not registered"),
    "new": ({"a": 1}, {"a": 1, "b": 1}, "state: b is registered, but not in the checkpoint"),
    "kind": (
        {"a": 1},
        {"a": sgd()},
        "state: a is of kind optimizer in this program and of kind value in the checkpoint",
    ),
    "shape": (
        {"model": nn.Linear(2, 3)},
        {"model": nn.Linear(2, 4)},
        "state: model/weight is F32 [3, 2] in the checkpoint and F32 [4, 2] in this program",
    ),
    "layer": ({"model": nn.Linear(2, 3)}, {"model": nn.Linear(2, 3, bias=False)}, "state: model/bias is in the check"),
    "no layer": ({"model": nn.Linear(2, 3, bias=False)}, {"model": nn.Linear(2, 3)}, "state: model/bias is not in the"),
    "groups": (
        {"o": sgd()},
        {"o": torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))]}, *sgd().param_groups], lr=1.0)},
        "state: o has 1 parameter groups in the checkpoint and 2 in this program",
    ),
    "parameters": (
        {"o": STEPPED},
        {"model": (tiny := nn.Linear(2, 1)), "o": torch.optim.SGD(tiny.parameters(), lr=1.0)},
        "state: model is registered, but not in the checkpoint",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_program_is_refused_by_name(name, tmp_path):
    before, after, message = OTHERS[name]
    store(tmp_path / "run", **before)
    with pytest.raises(RefusedError) as refused:
        restore(tmp_path / "run", **after)
    assert message in str(refused.value)


def differing(world: World, what: str) -> list[str]:
    torch.manual_seed(world.rank if what in ("weights", "buffers") else 0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    if what == "buffers":
        model = nn.parallel.DistributedDataParallel(model)
        model.module[1].running_mean.fill_(world.rank)
    torch.manual_seed(0)
    layers = nn.Linear(2, 3 + world.rank) if what == "shapes" else nn.Linear(2, 3)
    value = world.rank if what == "values" else 1
    problem = {"f": Holder(f=print if world.rank == 1 and what == "functions" else 1)}
    try:
        state = State({"model": model, "layers": nn.ModuleList([layers]), "seen": {"deep": [0, value]}})
        if what == "functions":
            state = State({"ok": (late := Holder(f=1)), "best": 1})
            late.held = problem["f"].held
        state.join(world)
    except RefusedError as error:
        return [str(error)]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "state: model/0.weight: its values on rank 1 differ from rank 0's; wrap the model in Distrib"),
        ("buffers", ""),
        ("shapes", "state: layers/0.weight F32 [4, 2] on rank 1, but layers/0.weight F32 [3, 2] on rank 0; register"),
        ("values", "state: seen/deep/1 is 1 on rank 1, but seen/deep/1 is 0 on rank 0; register the same"),
        ("functions", "rank 1: state: ok/f: a function cannot be stored"),
    ],
)
def test_every_rank_refuses_what_differs_or_what_one_cannot_store(on_ranks, what, message):
    for said in on_ranks(2, differing, what=what):
        assert (said == []) if not message else said[0].startswith(message), said


TORCH_FREE = """
import random, sys
from types import SimpleNamespace
from muster.jobs.session.state.state import State

class Sampler:
    epoch = 3
    def state_dict(self): return {"epoch": self.epoch}
    def load_state_dict(self, state): self.epoch = state["epoch"]

def make(best):
    state = State({"best": best, "sampler": Sampler(), "seen": [1, 2.5, "x", {"a": (1,)}]})
    state.join(SimpleNamespace(rank=0, size=1, group=None))
    return state

state = make(0.5)
state.sampler.epoch = 7
assert state.parts() == [] and not state.has_tensors
meta = state.meta()
drawn = random.random()
fresh = make(0.1)
fresh.seen = []
fresh.load(None, None, meta)
assert (fresh.best, fresh.sampler.epoch, fresh.seen) == (0.5, 7, [1, 2.5, "x", {"a": (1,)}])
assert random.random() == drawn
assert not {"torch", "numpy", "pydantic", "typing_extensions"} & sys.modules.keys()
"""


def test_a_program_with_plain_values_alone_imports_no_torch():
    subprocess.run([sys.executable, "-c", TORCH_FREE], check=True, timeout=60)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.5, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.StepLR(o, 2)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_with_the_same_learning_rates(name, tmp_path):
    def rates(scheduler: Any, steps: int) -> list[float]:
        found = []
        for step in range(steps):
            scheduler.step(*([1.0 + step] if name == "plateau" else []))
            found.append(scheduler.optimizer.param_groups[0]["lr"] if hasattr(scheduler, "optimizer") else 0.0)
        return found

    one, other = (sgd(), sgd())
    scheduler = SCHEDULERS[name](one)
    rates(scheduler, 3)
    fresh = SCHEDULERS[name](other)
    store(tmp_path / "run", optimizer=one, scheduler=scheduler)
    restore(tmp_path / "run", optimizer=other, scheduler=fresh)
    assert rates(fresh, 12) == rates(scheduler, 12)
    assert other.param_groups[0]["lr"] == one.param_groups[0]["lr"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "groups": lambda p: torch.optim.AdamW([{"params": [each], "lr": 0.01} for each in p]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_bit_by_bit(name, tmp_path):
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return model, OPTIMIZERS[name](list(model.parameters()))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses: list[float] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            losses.append(loss.item())
            return loss

        for _ in range(steps):
            optimizer.step(closure)  # type: ignore[arg-type]
        return losses

    model, optimizer = make()
    train(model, optimizer, 2)
    fresh, resumed = make()
    store(tmp_path / "run", model=model, optimizer=optimizer)
    restore(tmp_path / "run", model=fresh, optimizer=resumed)
    assert train(fresh, resumed, 3) == train(model, optimizer, 3)
