"""Unusual uses of stages 1 and 2: each ends as in one process, or with an error message."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from torch import nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from support.data_parallel_models import CASES, ToyModel, seeded
from support.zero_use import sgd, wrap

pytestmark = pytest.mark.ranks

TOY = CASES["toy"]
Optimizer = torch.optim.Optimizer


class Alone:
    """One process with the interface of the wrapper; its gradients are the mean over all ranks' shards."""

    def __init__(self, ranks: int) -> None:
        self.module, self.ranks = seeded(ToyModel, 1), ranks

    def backward(self, step: int) -> None:
        total = {name: torch.zeros_like(each) for name, each in self.module.named_parameters()}
        before = {name: each.grad for name, each in self.module.named_parameters()}
        for shard in range(step * self.ranks, (step + 1) * self.ranks):
            for each in self.module.parameters():
                each.grad = None
            TOY.loss(self.module, shard).backward()
            for name, each in self.module.named_parameters():
                total[name] += each.grad
        for name, each in self.module.named_parameters():
            mean = total[name] / self.ranks if self.ranks > 1 else total[name]
            each.grad = mean if before[name] is None else before[name] + mean


class Wrapped:
    """A wrapper with the interface of `Alone`."""

    def __init__(self, model: ShardedDataParallel, rank: int) -> None:
        self.model, self.module, self.rank = model, model.module, rank

    def backward(self, step: int) -> None:
        TOY.loss(self.model, step * self.model.ranks + self.rank).backward()


def plain(side, optimizer: Optimizer) -> None:
    for step in range(2):
        optimizer.zero_grad()
        side.backward(step)
        optimizer.step()


def adds_up(side, optimizer: Optimizer) -> None:
    """Run backwards without zero_grad in between; then steps without a forward, and one without a gradient."""
    side.backward(0)
    side.backward(1)
    optimizer.step()
    optimizer.step()
    side.backward(2)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def scheduled(side, optimizer: Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        side.backward(step)
        optimizer.step()
        scheduler.step()
        optimizer.param_groups[0]["momentum"] *= 0.9


def with_closures(side, optimizer: Optimizer) -> None:
    def closure() -> None:
        optimizer.zero_grad()
        side.backward(1)

    plain(side, optimizer)
    optimizer.step(closure)


def evaluated_between(side, optimizer: Optimizer) -> None:
    call = side.model if isinstance(side, Wrapped) else side.module
    plain(side, optimizer)
    with torch.no_grad():
        call(torch.ones(2, 10))
    call(torch.ones(2, 10))  # a forward with gradients, but no backward
    plain(side, optimizer)


def parts_called_by_themselves(side, optimizer: Optimizer) -> None:
    """Between steps, call a part of the module directly, and make a parameter from its result."""
    plain(side, optimizer)
    with torch.no_grad():
        seen = side.module.fc2(torch.ones(1, 20)).sum() + side.module.norm(torch.ones(1, 20)).sum()
        next((side.module if isinstance(side, Alone) else side.model).parameters()).mul_(seen)
    plain(side, optimizer)


def raised(side, optimizer: Optimizer) -> None:
    """Raise errors in the forward, and in the middle of a backward; then continue training."""

    def fails(*_) -> None:
        raise KeyError("on purpose")

    plain(side, optimizer)
    for register in (side.module.norm.register_forward_hook, side.module.fc1.weight.register_hook):
        handle = register(fails)
        with pytest.raises(KeyError, match="on purpose"):
            side.backward(1)
        handle.remove()
        optimizer.zero_grad()
        side.backward(2)
        optimizer.step()


USES = {
    use.__name__: use
    for use in (plain, adds_up, scheduled, with_closures, evaluated_between, parts_called_by_themselves, raised)
}


def used_apart(world: World) -> list[str]:
    problems = []
    for name, use in USES.items():
        alone = Alone(world.size)
        use(alone, sgd(None, alone.module))
        for stage in (1, 2):
            model = wrap(world, stage)
            use(Wrapped(model, world.rank), sgd(model, model.module))
            found, wanted = model.state_dict(), alone.module.state_dict()
            problems += [f"{name}, stage {stage}: {key}" for key in wanted if not torch.equal(found[key], wanted[key])]
    return problems


def test_uses_end_as_in_one_process(on_ranks):
    assert on_ranks(3, used_apart) == [[]] * 3


class Either(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})

    def forward(self, which: str, inputs: torch.Tensor) -> torch.Tensor:
        return self[which](inputs)


def unused_once(world: World) -> list[str]:
    """A parameter used only by the first of two backwards keeps that gradient, and is stepped."""
    problems = []
    for stage in (1, 2):
        model = wrap(
            world,
            stage,
            Either,
            find_unused_parameters=True,
        )
        optimizer = model.optimizer(torch.optim.SGD, lr=1.0)
        before = model.module["a"].bias.detach().clone()
        for which in ("a", "b"):
            model(which, torch.ones(1, 3)).sum().backward()
        if set(model.full_gradients()) != {"a.weight", "a.bias", "b.weight", "b.bias"}:
            problems.append(f"stage {stage}: gradients of {sorted(model.full_gradients())}")
        optimizer.step()
        model.synchronize()
        problems += [] if torch.equal(model.module["a"].bias, before - 1) else [f"stage {stage}: a was not stepped"]
        optimizer.zero_grad()
        model("b", torch.ones(1, 3)).sum().backward()
        problems += [] if set(model.full_gradients()) == {"b.weight", "b.bias"} else [f"stage {stage}: a is used still"]
    return problems


def not_finite(world: World) -> list[str]:
    """Gradients clipped by a NaN norm are dropped by zero_grad, including the gaps between them."""
    problems = []
    for stage in (1, 2):
        model = wrap(world, stage, lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), exact=False)  # with gaps
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        for value in (float("nan"), 1.0):
            optimizer.zero_grad()
            model(torch.full((1, 3), value)).sum().backward()
            norm = float(optimizer.clip_grad_norm_(1.0))
        problems += [] if math.isfinite(norm) else [f"stage {stage}: norm {norm}"]
    return problems


def test_gradients_of_one_backward_do_not_count_for_another(on_ranks):
    assert on_ranks(2, unused_once) == [[]] * 2
    assert on_ranks(2, not_finite) == [[]] * 2


def states(world: World) -> list[str]:
    """Load with and without the wrapper while parameters are being gathered; also 16-bit ones with their masters."""
    problems = []
    for stage in (1, 2):
        for past in (False, True):
            half = {"build": lambda: nn.Linear(4, 4).bfloat16()}
            model, other = wrap(world, stage, **half), nn.Linear(4, 4).bfloat16()
            for each in other.parameters():
                nn.init.constant_(each, 0.25)
            optimizer = model.optimizer(torch.optim.SGD, lr=0.5)
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            (model.module if past else model).load_state_dict(other.state_dict())
            optimizer.step()
            model.synchronize()
            if not torch.equal(model.module.bias, torch.full((4,), -0.25, dtype=torch.bfloat16)):
                problems.append(f"stage {stage}, past {past}: {model.module.bias.tolist()}")
            if [*model.state_dict()] != ["weight", "bias"] or [n for n, _ in model.named_parameters()] != [
                "weight",
                "bias",
            ]:
                problems.append("names are not the module's")
    return problems


def within_another(world: World) -> list[str]:
    problems = []
    for stage in (1, 2, 3):
        outer, plainly = nn.Sequential(wrap(world, stage), nn.Linear(5, 5)), nn.Sequential(ToyModel(), nn.Linear(5, 5))
        if list(state := outer.state_dict()) != list(plainly.state_dict()):
            problems.append(f"stage {stage}: {list(state)}")
        with pytest.raises(RuntimeError, match="cannot be moved or converted"):
            outer.double()
        if stage < 3:
            outer.load_state_dict(plainly.state_dict())
            found = outer(torch.ones(2, 10))
            problems += [] if torch.equal(found, plainly(torch.ones(2, 10))) else [f"stage {stage}: loaded otherwise"]
    return problems


def test_states_are_the_modules_own(on_ranks):
    assert on_ranks(2, states) == [[]] * 2
    assert on_ranks(2, within_another) == [[]] * 2


def let_go(world: World) -> list[str]:
    problems = []
    gc.disable()  # so that reference cycles would keep memory
    for stage in (1, 2):
        model = wrap(world, stage, exact=False)
        module, optimizer = model.module, sgd(model, model.module)
        plain(Wrapped(model, world.rank), optimizer)
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"get the module with unwrap\(\)"):
                copying(model)
        model.synchronize()
        copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        dead = [weakref.ref(each) for each in (model, model._reducer, model._reducer.buckets[0], model.residency)]
        wanted = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        Wrapped(model, world.rank).backward(7)
        optimizer.step()
        del model, optimizer
        problems += [f"stage {stage}: {place} lives" for place, each in enumerate(dead) if each() is not None]
        if any(part._forward_pre_hooks or part._state_dict_pre_hooks for part in module.modules()):
            problems.append(f"stage {stage}: hooks are left")
        for which in (copied, pickled):
            which(torch.ones(1, 10))
            same = all(torch.equal(which.state_dict()[name], each) for name, each in wanted.items())
            problems += [] if same else [f"stage {stage}: the copy has other values"]
        again = ShardedDataParallel(
            module, world.group, stage=stage
        )  # on the same group, with the last gathered values
        plain(Wrapped(again, world.rank), sgd(again, module))
    return problems


def test_a_deleted_wrapper_leaves_the_module_whole_and_nothing_else(on_ranks):
    assert on_ranks(2, let_go) == [[]] * 2


def heard(world: World) -> list[list[bool]]:
    """Return the notifications of waits: in a step, and in a forward whose wait fails."""
    found = []
    for stage in (1, 2):
        model = wrap(world, stage)
        told: list[bool] = []
        model.on_wait = told.append
        plain(Wrapped(model, world.rank), sgd(model, model.module))
        model.synchronize()
        found.append(told[:])
        model.residency._under_way[id(model.flat_parameters[0])] = (model.flat_parameters[0], lambda: 1 / 0)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            model.synchronize()
        found.append(told[len(found[-1]) :])
    return found


def test_every_wait_is_told_of_and_its_end_too(on_ranks):
    for found in on_ranks(2, heard):
        for told in found:
            assert told
            assert told == [True, False] * (len(told) // 2)
