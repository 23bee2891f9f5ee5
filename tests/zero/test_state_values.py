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

STEPS = {"int": lambda: 0, "one": lambda: torch.zeros(1), "half": lambda: torch.zeros((), dtype=torch.bfloat16)}


class Momentum(torch.optim.Optimizer):
    """Steps with a debiased mean. `kind` decides how it counts steps; only "one" keeps nothing but tensors."""

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
            state.update(mean=torch.zeros_like(each), step=STEPS[group["kind"]]())
            state |= {} if group["kind"] == "one" else {"first": True, "prior": None}
        state["step"] = state["step"] + 1
        state["mean"].mul_(0.9).add_(each.grad, alpha=0.1)
        each.sub_(group["lr"] * state["mean"] / (1 - 0.9 ** float(state["step"])))
        if "first" in state:
            assert state["first"] is (state["prior"] is None)
            state.update(first=False, prior=float(state["step"]))


def parameters() -> list[nn.Parameter]:
    """Parameters of which ranks hold all, a part, one element or nothing."""
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in [(5, 7), (3,), (17,), (1,), (), (0, 2)]]


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for place, each in enumerate(params):
            each.grad = torch.full_like(each, 0.1 * (step + 1) * (place + 1)) if place != 1 or step else None
        optimizer.step()


def apart(params: list[nn.Parameter], others: list[nn.Parameter]) -> list[int]:
    return [place for place, each in enumerate(params) if not torch.allclose(each, others[place], rtol=1e-12)]


def forms(state: dict[int, Any]) -> list[Any]:
    """Return the names, kinds, shapes and numbers of a state."""
    values = [(number, key, value) for number, kept in sorted(state.items()) for key, value in sorted(kept.items())]
    return [(*at, (type(each), each.shape, each.dtype) if isinstance(each, Tensor) else each) for *at, each in values]


def saved(world: World, folder: str) -> list[str]:
    problems = []
    for kind in STEPS:
        whole, params = parameters(), parameters()
        reference, optimizer = Momentum(whole, kind=kind), ShardedOptimizer(params, Momentum, kind=kind)
        train(whole, reference, range(2))
        train(params, optimizer, range(2))
        full = optimizer.full_state_dict()
        problems += [] if forms(full["state"]) == forms(reference.state_dict()["state"]) else [f"{kind}: {full}"]
        torch.save({"params": [each.detach() for each in whole], "state": full}, f"{folder}/{kind}-{world.rank}.pt")
    return problems


def loaded(world: World, folder: str) -> list[str]:
    """Load into sharded and plain optimizers; both continue as one process."""
    problems = []
    for kind in STEPS:
        train(whole := parameters(), Momentum(whole, kind=kind), range(4))
        read = torch.load(f"{folder}/{kind}-0.pt", weights_only=True)
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
    """Save and load the ranks' shards in a wrapper, where neighbouring parameters are stepped as one tensor."""
    problems = []
    for stage, kind in ((stage, kind) for stage in (1, 2, 3) for kind in STEPS):
        made: list[Any] = []
        for steps in (range(4), range(2), range(2, 4)):
            torch.manual_seed(2)
            model = ShardedDataParallel(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), world.group, stage=stage)
            made.append((model, model.optimizer(Momentum, kind=kind)))
            if len(made) == 3:
                model.load_state_dict(made[1][0].state_dict())
                made[2][1].load_state_dict(copy.deepcopy(made[1][1].state_dict()))
            for step in steps:
                made[-1][1].zero_grad()
                model(torch.full((2, 5), 0.1 * step)).pow(2).mean().backward()
                made[-1][1].step()
        found, wanted = made[2][0].state_dict(), made[0][0].state_dict()
        problems += [f"stage {stage}, {kind}: {name}" for name in wanted if not found[name].equal(wanted[name])]
    return problems


def test_the_optimizer_of_a_wrapper_saves_and_loads_them_too(on_ranks):
    assert on_ranks(2, stages) == [[]] * 2


STRANGE: dict[str, tuple[Any, str]] = {
    "list": ([1, 2], "'list' of parameter groups[0][0] is a list, which cannot be sharded"),
    "rows": (torch.zeros(2), "'rows' of parameter groups[0][0] is a tensor of shape (2,)"),
    "complex": (torch.zeros(1, dtype=torch.complex64), "is a tensor of shape (1,)"),
    "key": (7, "has the key 'key', which is not a parameter"),
}


class Strange(Momentum):
    """Has a state that cannot be sharded."""

    def update(self, group: dict[str, Any], each: Tensor, state: dict[str, Any]) -> None:
        name = group["kind"]
        (self.state if name == "key" else state)[name] = STRANGE[name][0]


def refused(world: World) -> dict[str, list[str]]:
    """Use one parameter, of which only the first rank has a part."""
    said = {}
    for name in STRANGE:
        train(params := [nn.Parameter(torch.zeros(7))], made := ShardedOptimizer(params, Strange, kind=name), range(1))
        said[name] = [said_by(made.full_state_dict, ValueError)]
        if world.rank == 0:
            said[name] += [said_by(made.state_dict, ValueError), said_by(lambda: State({"o": made}), RefusedError)]
    return said


def test_other_states_are_refused_by_name_on_all_ranks(on_ranks):
    for said in on_ranks(2, refused):
        assert [name for name, texts in said.items() if not all(STRANGE[name][1] in each for each in texts)] == []


def in_a_session(world: World, folder: str, saves: bool) -> list[int]:
    train(whole := parameters(), Momentum(whole, kind="one"), range(4))
    params = list(model := nn.ParameterList(parameters()))
    optimizer = ShardedOptimizer(params, Momentum, kind="one")
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
    assert on_ranks(3, in_a_session, folder=str(tmp_path), saves=True) == [[]] * 3
    assert on_ranks(2, in_a_session, folder=str(tmp_path), saves=False) == [[]] * 2


def numbers(world: World, folder: str) -> list[str]:
    """Load the numbers of a plain optimizer into a sharded one; save a sharded one's; add a key to the plain one."""
    train(params := parameters(), plain := Momentum(params), range(2))
    sharded = ShardedOptimizer(params, Momentum)
    states = [State({"optimizer": each}) for each in (plain, sharded)]
    for each in states:
        each.join(world)
    save(states[0], world, folder)
    said = [said_by(lambda: load(states[1], folder), RefusedError)]
    train(params, sharded, range(2))
    plain.state["steps"] = 7  # type: ignore[index]
    return said + [said_by(lambda: State({"optimizer": each}), RefusedError) for each in (sharded, plain)]  # noqa: B023


def test_a_session_refuses_values_that_it_cannot_store(on_ranks, tmp_path):
    (said,) = on_ranks(1, numbers, folder=str(tmp_path))
    assert "first, prior, step in the checkpoint is not a tensor" in said[0]
    assert said[1].endswith("must be a tensor to be stored")
    assert "has the key 'steps', which is not a parameter" in said[2]
