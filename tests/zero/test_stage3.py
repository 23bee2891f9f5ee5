"""Stage 3 trains like one process with any units, and holds two of them at a time besides the root."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from support.data_parallel import same_bits
from support.stage3 import Alone, Watch, backwards, wrap
from support.zero_units import CASES, Case

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 3


def bytes_whole(model: ShardedDataParallel) -> int:
    return sum(flat_parameter.full.untyped_storage().nbytes() for flat_parameter in model.flat_parameters)


def held_wrongly(model: ShardedDataParallel) -> list[str]:
    """Describe what a rank wrongly holds between steps."""
    problems = [] if bytes_whole(model) == 0 else [f"{bytes_whole(model)} bytes of whole parameters"]
    with_gradients = [name for name, each in model.module.named_parameters() if each.grad is not None]
    problems += [f"whole gradients of {with_gradients}"] if with_gradients else []
    for flat_parameter in model.flat_parameters:
        each = flat_parameter.full_bytes // model.ranks
        for what, tensor in (("parameters", flat_parameter.shard), ("gradients", flat_parameter.grad)):
            if tensor is not None and tensor.untyped_storage().nbytes() != each:
                problems.append(
                    f"{flat_parameter.names[0]}: {tensor.untyped_storage().nbytes()} bytes of {what}, not {each}"
                )
    return problems


def wrong_training(world: World, case: Case, shards: int = 2, **settings: Any) -> list[str]:
    """Train. Every gradient and the final parameters must have the bits of one process."""
    dtype = settings.pop("dtype", torch.float32)
    exact = settings.setdefault("exact", True)
    model, alone = wrap(world, case, dtype, **settings), Alone(case, dtype)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2, masters=False)
    watch, problems = Watch(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        backwards(world, model, step, shards)
        problems += [f"step {step}: {each}" for each in held_wrongly(model)]
        wanted, found = alone.gradients(step, world.size * shards), model.full_gradients()
        for name, mean in wanted.items():
            gradient = found.get(name)
            if mean is None or gradient is None:
                problems += [] if mean is gradient else [f"step {step}: {name} has {gradient}, wanted {mean}"]
            elif exact and not same_bits(gradient, mean):
                problems.append(f"step {step}: {name} is off by {float((gradient - mean).abs().max()):.1e}")
            elif not exact:
                torch.testing.assert_close(gradient, mean * shards)
                dict(alone.module.named_parameters())[name].grad = gradient
        optimizer.step()
        alone.step()
        problems += [f"after step {step}: {each}" for each in held_wrongly(model)]
    most = watch.most
    state = model.state_dict()
    problems += [name for name, each in alone.module.named_parameters() if not same_bits(state[name], each)]
    if most > case.at_most and settings.get("reshard_after_forward", True):
        problems.append(f"{most} units whole at a time, {case.at_most} wanted")
    return problems[:4]


def every_case(world: World, names: list[str], **settings: Any) -> dict[str, list[str]]:
    warnings.filterwarnings("ignore", "b1.*: got no gradient in this step on any rank")  # "in turns" skips b1
    found = {name: wrong_training(world, CASES[name], **settings) for name in names}
    return {name: problems for name, problems in found.items() if problems}


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, ["chain", "twice", "reentrant"]), (2, list(CASES)), (4, ["a part of each", "some used"])]
)
def test_gradients_and_parameters_have_the_bits_of_one_process(on_ranks, ranks, names):
    assert on_ranks(ranks, every_case, names=names) == [{}] * ranks


def other_settings(world: World) -> dict[str, Any]:
    return {
        "kept": every_case(world, ["twice", "in turns", "checkpoints around"], reshard_after_forward=False),
        "16 bits": every_case(world, ["chain"], dtype=torch.bfloat16),
        "sharded": every_case(world, ["some used"], exact=False, shards=1, accumulate="sharded"),
        "local": every_case(world, ["adapted"], exact=False),
    }


def test_other_settings_train_as_one_process_too(on_ranks):
    assert on_ranks(2, other_settings) == [{"kept": {}, "16 bits": {}, "sharded": {}, "local": {}}] * 2


def parameters_held(world: World) -> list[int]:
    """Return the bytes of parameters on this rank: before, at most during, and after a step; and the expected ones."""
    case = CASES["chain"]
    model = wrap(world, case)
    optimizer, unit_states = model.optimizer(torch.optim.SGD, lr=0.1), model.residency.unit_states
    shards = sum(flat_parameter.shard.untyped_storage().nbytes() for flat_parameter in model.flat_parameters)
    whole = sum(flat_parameter.full_bytes for flat_parameter in model.flat_parameters)
    one = max(
        sum(flat_parameter.full_bytes for flat_parameter in unit_state.flat_parameters) for unit_state in unit_states
    )
    most: list[int] = []
    for flat_parameter in model.flat_parameters:
        flat_parameter.take_memory = partial(take_and_tell, flat_parameter.take_memory, model, most)
    for step in range(2):
        before = bytes_whole(model)
        backwards(world, model, step, 1)
        within = bytes_whole(model)
        optimizer.step()
        optimizer.zero_grad()
    return [shards * world.size - whole, before, within, bytes_whole(model), max(most) - 2 * one]


def take_and_tell(take: Callable[[], None], model: ShardedDataParallel, most: list[int]) -> None:
    take()
    most.append(bytes_whole(model))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_holds_its_shard_and_within_a_step_two_units(on_ranks, ranks):
    assert on_ranks(ranks, parameters_held) == [[0] * 5] * ranks


def events(world: World, reshard: bool = True) -> list[str]:
    """Return the events in the second step of four blocks: starts of gathers, forwards of blocks, frees."""
    model = wrap(world, CASES["chain"], reshard_after_forward=reshard)
    told: list[str] = []
    for unit_state in model.residency.unit_states[:-1]:
        (flat_parameter,), (block,) = unit_state.flat_parameters, unit_state.unit.modules
        flat_parameter.take_memory = partial(tell, told, f"gather {unit_state.unit.name}", flat_parameter.take_memory)
        flat_parameter.free = partial(tell, told, f"free {unit_state.unit.name}", flat_parameter.free)
        block.up.register_forward_hook(lambda *_, name=unit_state.unit.name: told.append(f"run {name}"))
        block.up.register_forward_hook(partial(tell_backward, told, f"back {unit_state.unit.name}"))
    backwards(world, model, 0, 1)
    told.clear()
    backwards(world, model, 1, 1)
    return told


def tell(told: list[str], what: str, do: Callable[[], None]) -> None:
    told.append(what)
    do()


def tell_backward(told: list[str], what: str, module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: told.append(what))


FORWARD = """gather b0, gather b1, run b0, free b0, gather b2, run b1, free b1, gather b3, run b2, free b2, run b3"""
BACKWARD = """gather b2, back b3, free b3, gather b1, back b2, free b2, gather b0, back b1, free b1, back b0, free b0"""


def test_a_unit_is_gathered_while_the_one_before_it_computes(on_ranks):
    (found,) = on_ranks(1, events)
    assert ", ".join(found) == f"{FORWARD}, {BACKWARD}"
    (found,) = on_ranks(1, events, reshard=False)
    assert ", ".join(found) == (
        "gather b0, gather b1, run b0, gather b2, run b1, gather b3, run b2, run b3, "
        "back b3, free b3, back b2, free b2, back b1, free b1, back b0, free b0"
    )


def backwards_parts(flat_parameter: Any, flat: torch.Tensor) -> list[torch.Tensor]:
    return list(flat.chunk(flat_parameter.layout.ranks))[::-1]


def keep(bucket: Any, mean: torch.Tensor) -> None:
    bucket.flat_parameter.add_gradient(mean)
    bucket.slots[0].parameter.grad = torch.zeros(bucket.flat_parameter.shapes[0])


MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "never freed": (
        "muster.zero.flat.FlatParameters.free",
        lambda flat_parameter: setattr(flat_parameter, "is_whole", False),
    ),
    "never gathered again": ("muster.zero.unit_states.UnitState.close", lambda unit_state: None),
    "freed in the end only": ("muster.zero.unit_states.UnitStates._is_over", lambda self, unit_state, runs: None),
    "a neighbour's shard": ("muster.zero.flat.FlatParameters.parts", backwards_parts),
    "nothing reduced": ("muster.zero.scatter.ordered_mean_part", lambda shards, mine, group: None),
    "gradients kept": ("muster.zero.data_parallel.PassingGradients.deliver", keep),
    "nothing gathered ahead": ("muster.zero.unit_states.UnitStates._next", lambda self, unit_state: None),
}


def mutated(world: World) -> dict[str, list[str]]:
    found = {}
    for name, (what, instead) in MUTANTS.items():
        with mock.patch(what, instead):
            if name == "nothing gathered ahead":
                found[name] = [] if FORWARD in ", ".join(events(world)) else ["another order"]
            elif name == "gradients kept":
                with pytest.raises(RuntimeError) as refused:
                    wrong_training(world, CASES["chain"], shards=1)
                found[name] = [str(refused.value)]
            else:
                found[name] = wrong_training(world, CASES["chain"], shards=1)
    return found


def test_mistakes_are_noticed(on_ranks):
    for found in on_ranks(2, mutated):
        assert [name for name, problems in found.items() if not problems] == []
        told = {name: problems[0] for name, problems in found.items()}
        assert "bytes of whole parameters" in told["never freed"]
        assert "b0.scale and 3 more: has a .grad that was not averaged over ranks" in told["gradients kept"]
        assert told["freed in the end only"] == "4 units whole at a time, 2 wanted"
