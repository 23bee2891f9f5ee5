"""States of a sharded optimizer: saved and loaded at different numbers of ranks; or refused without any change."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, ShardedOptimizer
from support.data_parallel import one_process, same_bits
from support.data_parallel_models import Case
from support.zero_models import OPTIMIZERS, Ragged, Several, own_groups, ragged_loss, row_major, seeded
from support.zero_optimizer import Pair, pair, photograph, refusal, states_apart, unchanged

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

WITHOUT = ("up.bias", "embed.weight", "none")


def trained(optimizer: str, steps: int = 2, **settings: Any) -> Pair:
    made = pair(optimizer, **settings)
    for step in range(steps):
        made.draw(step, WITHOUT if step == 0 else ())
        made.step()
    return made


def consolidated(world: World) -> list[str]:
    """Consolidate on each rank, and load into an optimizer that is not sharded."""
    problems = []
    for name in ("sgd", "adamw foreach", "asgd", "sgd plain"):
        made = trained(name, groups=own_groups)
        wanted = made.reference.state_dict()
        for recipient in range(world.size):
            whole = made.optimizer.consolidate_state_dict(recipient)
            if (whole is None) != (world.rank != recipient):
                problems.append(f"{name}: rank {world.rank} got {whole}, the recipient is {recipient}")
            elif whole is not None:
                problems += [f"{name} on {recipient}: {each}" for each in states_apart(whole, wanted)]
        full = made.optimizer.full_state_dict()
        kind, options = OPTIMIZERS[name]
        loaded = row_major(seeded(Ragged, 2))
        loaded.load_state_dict(made.module.state_dict())
        other = kind(own_groups(loaded), **options)
        other.load_state_dict(full)
        made.twin, made.reference = loaded, other  # continue training with it
        made.draw(7)
        made.step()
        problems += [f"{name}, gone on: {each}" for each in made.apart()]
    return problems


def stepped_in_part(world: World) -> list[str]:
    """Step one element of each parameter: masters on other ranks equal the rounded parameter, and count too."""
    made = pair("sgd plain", dtype=torch.bfloat16)
    for each in made.module.parameters():
        each.grad = torch.zeros_like(each, memory_format=torch.contiguous_format)
        each.grad.view(-1)[:1] = 2.0**-7
    made.follow()
    made.step()
    full = made.optimizer.full_state_dict()["state"]
    twins = list(made.twin.parameters())
    return [f"master of {number}" for number in full if not same_bits(full[number]["master"], twins[number].detach())]


def test_masters_that_were_stepped_in_part_are_whole(on_ranks):
    assert on_ranks(3, stepped_in_part) == [[]] * 3


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_whole_state_is_that_of_an_optimizer_that_is_not_sharded(on_ranks, ranks):
    assert on_ranks(ranks, consolidated) == [[]] * ranks


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "groups": own_groups},
    "adamw": {"optimizer": "adamw fused", "dtype": torch.bfloat16},
    "adagrad": {"optimizer": "adagrad"},
    "asgd": {"optimizer": "asgd", "build": lambda: Several([torch.float32, torch.float64, torch.bfloat16])},
}


def saved(world: World, folder: str) -> None:
    for name, settings in CASES.items():
        made = trained(**settings)
        whole = made.optimizer.consolidate_state_dict(world.size - 1)
        if whole is not None:
            torch.save({"model": made.module.state_dict(), "optimizer": whole}, f"{folder}/{name}.pt")


def gone_on(world: World, folder: str) -> list[str]:
    """Load into a new optimizer, and into one that has stepped; both must continue like the saved one."""
    problems = []
    for name, settings in CASES.items():
        read = torch.load(f"{folder}/{name}.pt", weights_only=True)
        for stepped in (False, True):
            uninterrupted = trained(**settings)
            made = pair(**settings, seed=5)
            if stepped:
                made.draw(9)
                made.step()
            made.module.load_state_dict(read["model"])
            made.optimizer.load_state_dict(read["optimizer"])
            made.twin, made.reference = uninterrupted.twin, uninterrupted.reference
            made.draw(3, WITHOUT)
            made.step()
            problems += [f"{name}, stepped {stepped}: {each}" for each in made.apart()]
            before = photograph(made)
            made.optimizer.load_state_dict(made.optimizer.state_dict())  # its own shard
            problems += [] if unchanged(made, before) else [f"{name}: its own shard changes it"]
    return problems


@pytest.mark.parametrize(("ranks", "later"), [(4, 1), (4, 3), (1, 2)])
def test_training_goes_on_at_another_number_of_ranks(on_ranks, tmp_path, ranks, later):
    on_ranks(ranks, saved, folder=str(tmp_path))
    assert on_ranks(later, gone_on, folder=str(tmp_path)) == [[]] * later


def learning(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def from_stage_to_stage(world: World) -> list[str]:
    """Pass one training from stage to stage and to an optimizer without a wrapper; exact sums, so bits are compared."""
    case, (kind, options) = Case(Ragged, ragged_loss), OPTIMIZERS["adamw fused"]
    twin = row_major(seeded(Ragged))
    reference = kind(learning(twin), **options)
    weights, state = twin.state_dict(), reference.state_dict()
    problems = []
    for turn, stage in enumerate((1, 3, 0, 2)):
        module = seeded(Ragged, 7)
        if stage:
            model: Any = ShardedDataParallel(module, stage=stage, exact=True)
            optimizer = model.optimizer(kind, **options)
        else:
            model, optimizer = module, ShardedOptimizer(learning(module), kind, **options)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        means = one_process(case, twin, range(turn * world.size, (turn + 1) * world.size)).means
        if stage:
            ragged_loss(model, turn * world.size + world.rank).backward()
        for name, each in twin.named_parameters():
            each.grad = means.get(name)
        if not stage:
            for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
                mine.grad = other.grad
        optimizer.step()
        reference.step()
        weights = {name: each.clone() for name, each in model.state_dict().items()}
        state = optimizer.full_state_dict()
        wanted = twin.state_dict()
        problems += [f"stage {stage}: {name}" for name in wanted if not same_bits(weights[name], wanted[name])]
        problems += [f"stage {stage}: {each}" for each in states_apart(state, reference.state_dict())]
    return problems


def test_a_training_goes_from_stage_to_stage(on_ranks):
    assert on_ranks(3, from_stage_to_stage) == [[]] * 3


Wrong = Callable[[World, Pair], dict[str, Any]]


def changed(state: dict[str, Any], number: int, **entries: Any) -> dict[str, Any]:
    """Return a state with changed entries of one parameter."""
    return {**state, "state": {**state["state"], number: {**state["state"][number], **entries}}}


def of_another_rank(world: World, made: Pair) -> dict[str, Any]:
    """Return the shard of the previous rank."""
    file = io.BytesIO()
    torch.save(made.optimizer.state_dict(), file)
    mine = torch.frombuffer(bytearray(file.getvalue().ljust(2**16)), dtype=torch.uint8)
    all_of_them = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(all_of_them, mine)
    file = io.BytesIO(bytes(all_of_them[world.rank - 1].tolist()))
    read: dict[str, Any] = torch.load(file, weights_only=True)
    return read


def on_one_rank_only(world: World, made: Pair) -> dict[str, Any]:
    state = made.optimizer.full_state_dict()
    return changed(state, 0, exp_avg=torch.zeros(3)) if world.rank == 1 else state


def whole_of(**settings: Any) -> Wrong:
    return lambda world, made: trained(**settings).optimizer.full_state_dict()


def without_a_parameter(world: World, made: Pair) -> dict[str, Any]:
    state = made.optimizer.full_state_dict()
    last = state["param_groups"][-1]
    return {**state, "param_groups": [*state["param_groups"][:-1], {**last, "params": last["params"][:-1]}]}


def settings_differ(world: World, made: Pair) -> dict[str, Any]:
    state = made.optimizer.full_state_dict()
    return {**state, "param_groups": [{**each, "lr": 0.1 * (world.rank + 1)} for each in state["param_groups"]]}


WRONG: dict[str, tuple[Wrong, str]] = {
    "no state": (lambda world, made: {"model": 3}, "with 'state' and 'param_groups'"),
    "other model": (
        whole_of(optimizer="adamw", build=lambda: nn.Linear(3, 3)),
        "a different model or different groups: its gr",
    ),
    "other shapes": (
        whole_of(optimizer="adamw", build=lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))),
        "has the shape",
    ),
    "other groups": (whole_of(optimizer="adamw", groups=own_groups), "its groups have [3, 3, 2] parameters, but this"),
    "a parameter missing": (without_a_parameter, "its groups have [7] parameters, but this optimizer has [8]"),
    "SGD's": (whole_of(optimizer="sgd"), "a different optimizer: its group 0 has no"),
    "SGD's state": (
        lambda world, made: {
            **made.optimizer.full_state_dict(),
            "state": trained("sgd").optimizer.full_state_dict()["state"],
        },
        "it has momentum_buffer, but this optimizer keeps exp_avg, exp_avg_sq, step",
    ),
    "one key missing": (
        lambda world, made: changed(made.optimizer.full_state_dict(), 4, step=None),
        "for parameter 4 it has exp_avg, exp_avg_sq, but this optimizer keeps exp_avg, exp_avg_sq, step",
    ),
    "another rank's shard": (of_another_rank, "load the result of full_state_dict() or consolidate_state_dict()"),
    "a stranger": (
        lambda world, made: {**made.optimizer.full_state_dict(), "state": {99: {}}},
        "it has a parameter 99 that is in none of its groups",
    ),
    "wrong on one rank": (on_one_rank_only, "exp_avg of parameter 0 has the shape (3,), but the parameter has ()"),
    "other settings on each rank": (settings_differ, "the ranks' states to load differ"),
}


def refusals(world: World) -> dict[str, list[Any]]:
    """Load invalid states; return the errors, and whether anything was changed."""
    made = trained("adamw")
    said = {}
    for name, (wrong, _) in WRONG.items():
        given = wrong(world, made)
        before = photograph(made)
        text = refusal(world, lambda given=given: made.optimizer.load_state_dict(given))
        said[name] = [text, unchanged(made, before)]
    return said


def test_a_state_that_does_not_fit_is_refused_on_all_ranks_and_nothing_is_changed(on_ranks):
    for said in on_ranks(3, refusals):
        for name, (text, is_unchanged) in said.items():
            assert text.startswith("ValueError: "), name
            assert WRONG[name][1] in text, name
            assert "\n" not in text
            assert is_unchanged, name


def of_ranks_apart(world: World) -> str:
    """Load a whole state on rank 0, and its shard on rank 1: both fit."""
    made = trained("adamw")
    full, shard = made.optimizer.full_state_dict(), made.optimizer.state_dict()
    return refusal(world, lambda: made.optimizer.load_state_dict(full if world.rank == 0 else shard))


def test_ranks_may_load_wholes_and_shards_side_by_side(on_ranks):
    assert on_ranks(2, of_ranks_apart) == ["", ""]


def missing_rank(world: World) -> str:
    optimizer = ShardedOptimizer(seeded(Ragged).parameters(), torch.optim.SGD, lr=0.1)
    return refusal(world, lambda: optimizer.consolidate_state_dict(2))


def test_a_recipient_that_is_not_there_is_refused(on_ranks):
    assert on_ranks(2, missing_rank) == ["ValueError: recipient_rank must be a rank of the group, 0 to 1, got 2"] * 2
