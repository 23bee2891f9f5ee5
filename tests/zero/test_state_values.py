"""States of hand-written optimizers: numbers and tensors of one element are saved and loaded, others are refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.state.state import State
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, ShardedOptimizer
from support.refusals import said_by
from support.sessions import load, save

pytestmark = pytest.mark.ranks


class Momentum(torch.optim.Optimizer):
    """Steps with a debiased mean; `kind` decides how it counts steps."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 0.1, kind: str = "int") -> None:
        super().__init__(params, {"lr": lr, "kind": kind})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.update(group, each, self.state[each])

    def update(self, group: dict[str, Any], each: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state.update(mean=torch.zeros_like(each), power=1.0, first=True, prior=None)
            state["step"] = {"int": 0, "one": torch.zeros(1), "half": torch.zeros((), dtype=torch.bfloat16)}[
                group["kind"]
            ]
        assert state["first"] is (state["prior"] is None)
        state["step"] = state["step"] + 1
        state["power"] *= 0.9
        state["mean"].mul_(0.9).add_(each.grad, alpha=0.1)
        each.sub_(group["lr"] * state["mean"] / (1 - state["power"]) * float(state["step"]) ** 0.5)
        state["first"], state["prior"] = False, float(state["step"])


KINDS = ("int", "one", "half")


def parameters() -> list[nn.Parameter]:
    """Parameters of which ranks hold all, a part, one element or nothing."""
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in [(5, 7), (3,), (17,), (1,), (), (0, 2)]]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for place, each in enumerate(params):
            each.grad = torch.full_like(each, 0.1 * (step + 1) * (place + 1))
            if place == 1 and step == 0:
                each.grad = None  # so that parameters have different numbers of steps
        optimizer.step()


def apart(params: list[nn.Parameter], others: list[nn.Parameter]) -> list[int]:
    return [place for place, each in enumerate(params) if not torch.allclose(each, others[place], rtol=1e-12)]


def differing(found: dict[int, Any], wanted: dict[int, Any]) -> list[str]:
    """Name what differs in two states: also the kinds and shapes of values."""
    return [
        f"{key} of {number}: {found[number].get(key)} where {value} was wanted"
        for number, kept in wanted.items()
        for key, value in kept.items()
        if type(found[number].get(key, ...)) is not type(value)
        or (found[number][key] != value if not isinstance(value, Tensor) else value.shape != found[number][key].shape)
    ]


def saved(world: World, folder: str) -> list[str]:
    problems = []
    for kind in KINDS:
        whole, params = parameters(), parameters()
        reference, optimizer = Momentum(whole, kind=kind), ShardedOptimizer(params, Momentum, kind=kind)
        train(whole, reference, range(2))
        train(params, optimizer, range(2))
        full = optimizer.full_state_dict()
        problems += [f"{kind}: {each}" for each in differing(full["state"], reference.state_dict()["state"])]
        own = copy.deepcopy(optimizer.state_dict())
        train(params, optimizer, range(2, 3))
        for each, other in zip(params, whole, strict=True):
            each.data = other.detach().clone()
        optimizer.load_state_dict(own)
        train(params, optimizer, range(2, 4))
        if world.rank == 0:
            torch.save({"params": [each.detach() for each in whole], "state": full}, f"{folder}/{kind}.pt")
        train(whole, reference, range(2, 4))
        problems += [f"{kind}, its own shard: {each}" for each in apart(params, whole)]
    return problems


def loaded(world: World, folder: str) -> list[str]:
    """Load into sharded and plain optimizers; both continue as one process."""
    problems = []
    for kind in KINDS:
        whole = parameters()
        train(whole, Momentum(whole, kind=kind), range(4))
        read = torch.load(f"{folder}/{kind}.pt", weights_only=True)
        for build in (Momentum, lambda params, kind: ShardedOptimizer(params, Momentum, kind=kind)):
            params = [nn.Parameter(each.clone()) for each in read["params"]]
            optimizer = build(params, kind=kind)
            optimizer.load_state_dict(copy.deepcopy(read["state"]))
            train(params, optimizer, range(2, 4))
            problems += [f"{kind}, {type(optimizer).__name__}: {each}" for each in apart(params, whole)]
    return problems


@pytest.mark.parametrize("ranks", [1, 3])
def test_numbers_and_tensors_of_one_element_are_saved_and_loaded_on_any_number_of_ranks(on_ranks, tmp_path, ranks):
    assert on_ranks(ranks, saved, folder=str(tmp_path)) == [[]] * ranks
    assert on_ranks(2, loaded, folder=str(tmp_path)) == [[]] * 2


def stages(world: World) -> list[str]:
    """Save and load in a wrapper, where neighbouring parameters are stepped as one tensor."""
    problems = []
    for stage in (1, 2, 3):
        for kind in KINDS:
            models = []
            for steps, load_from in ((range(4), None), (range(2), None), (range(2, 4), 1)):
                torch.manual_seed(2)
                model = ShardedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), world.group, stage=stage)
                optimizer = model.optimizer(Momentum, kind=kind)
                if load_from is not None:
                    model.load_state_dict(models[load_from][0].state_dict())
                    optimizer.load_state_dict(models[load_from][1].full_state_dict())
                for step in steps:
                    optimizer.zero_grad()
                    model(torch.full((2, 5), 0.1 * step)).pow(2).mean().backward()
                    optimizer.step()
                models.append((model, optimizer))
            found, wanted = models[2][0].state_dict(), models[0][0].state_dict()
            problems += [f"stage {stage}, {kind}: {name}" for name in wanted if not found[name].equal(wanted[name])]
    return problems


def test_the_optimizer_of_a_wrapper_saves_and_loads_them_too(on_ranks):
    assert on_ranks(2, stages) == [[]] * 2


class Strange(Momentum):
    """Has a state that cannot be sharded."""

    strange: Any = None
    key: Any = None

    def update(self, group: dict[str, Any], each: Tensor, state: dict[str, Any]) -> None:
        state["mean"] = torch.zeros_like(each)
        if self.key is None:
            state["strange"] = self.strange
        else:
            self.state[self.key] = self.strange


STRANGE: dict[str, tuple[Any, Any, str]] = {
    "a list": ([1, 2], None, "'strange' of parameter groups[0][0] is a list, which cannot be sharded"),
    "rows": (torch.zeros(2), None, "'strange' of parameter groups[0][0] is a tensor of shape (2,)"),
    "complex": (torch.zeros(1, dtype=torch.complex64), None, "is a tensor of shape (1,)"),
    "a key": (7, "steps", "has the key 'steps', which is not a parameter"),
}


def refused(world: World) -> dict[str, list[str]]:
    """Only the first rank has elements, and so a state."""
    said = {}
    for name, (value, key, _) in STRANGE.items():
        kind = type("Stranger", (Strange,), {"strange": value, "key": key})
        params = [nn.Parameter(torch.zeros(7))]
        optimizer = ShardedOptimizer(params, kind)
        params[0].grad = torch.ones(7)
        optimizer.step()
        said[name] = [said_by(optimizer.full_state_dict, ValueError)]
        if world.size == 1:
            said[name].append(said_by(optimizer.state_dict, ValueError))
            said[name].append(said_by(lambda: State({"optimizer": optimizer}), RefusedError))  # noqa: B023
    return said


def test_other_states_are_refused_by_name_on_all_ranks(on_ranks):
    for said in (*on_ranks(2, refused), *on_ranks(1, refused)):
        for name, (value, _, told) in STRANGE.items():
            assert all(told in each for each in said[name][:2]), name
            in_session = "strange of a ShardedOptimizer must be a tensor" if isinstance(value, list) else told
            assert all(in_session in each for each in said[name][2:]), name


def through_sessions(world: World, folder: str) -> dict[str, str]:
    """Save an optimizer with numbers, sharded and not, in a session; load the plain one's into a sharded one."""
    params = [nn.Parameter(torch.zeros(5, 7)), nn.Parameter(torch.zeros(3))]
    train(params, plain := Momentum(params), range(2))
    state = State({"optimizer": plain})
    state.join(world)
    save(state, world, folder)
    other = State({"optimizer": ShardedOptimizer(params, Momentum)})
    other.join(world)
    loading = said_by(lambda: load(other, folder), RefusedError)
    train(params, sharded := ShardedOptimizer(params, Momentum), range(2))
    plain.state["steps"] = 7  # type: ignore[index]
    return {
        "loading": loading,
        "saving": said_by(lambda: State({"optimizer": sharded}), RefusedError),
        "a key": said_by(lambda: State({"optimizer": plain}), RefusedError),
    }


def test_a_session_refuses_values_that_it_cannot_store(on_ranks, tmp_path):
    (said,) = on_ranks(1, through_sessions, folder=str(tmp_path))
    assert "first, power, prior, step in the checkpoint is no tensor" in said["loading"]
    assert "must be a tensor to be stored" in said["saving"]
    assert "has the key 'steps', which is not a parameter" in said["a key"]


class OneElement(Momentum):
    """Keeps tensors only."""

    def update(self, group: dict[str, Any], each: Tensor, state: dict[str, Any]) -> None:
        if not state:
            state.update(mean=torch.zeros_like(each), count=torch.zeros(1, dtype=torch.float64))
        state["count"] += 1
        state["mean"].mul_(0.9).add_(each.grad)
        each.sub_(group["lr"] * state["mean"] / state["count"].item())


def session(world: World, folder: str, saves: bool) -> list[int]:
    whole, model = parameters(), nn.ParameterList(parameters())
    params = list(model)
    train(whole, OneElement(whole), range(4))
    optimizer = ShardedOptimizer(params, OneElement)
    state = State({"model": model, "optimizer": optimizer})
    state.join(world)
    if saves:
        train(params, optimizer, range(2))
        save(state, world, folder)
    else:
        load(state, folder)
    train(params, optimizer, range(2, 4))
    return apart(params, whole)


def test_a_session_stores_tensors_of_one_element(on_ranks, tmp_path):
    assert on_ranks(3, session, folder=str(tmp_path), saves=True) == [[]] * 3
    for ranks in (1, 2):
        assert on_ranks(ranks, session, folder=str(tmp_path), saves=False) == [[]] * ranks
