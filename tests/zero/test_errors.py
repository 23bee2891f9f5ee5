"""A sharded wrapper refuses mistakes with a message, on the ranks that make them or on all ranks, and never hangs."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.ddp import timeouts
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, data_parallel, scatter
from support.data_parallel_models import CASES, ToyModel, seeded
from support.refusals import said_by
from support.sharded import SMALL_MB

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TOY = CASES["toy"]
TIMEOUT_S = 3.0


def wrap(world: World, module: nn.Module | None = None, **settings) -> ShardedDataParallel:
    settings = {"stage": 2, "bucket_size_mb": SMALL_MB, **settings}
    return ShardedDataParallel(seeded(ToyModel, 1) if module is None else module, world.group, **settings)


def refused_settings(world: World) -> dict[str, str]:
    strange = nn.Linear(2, 2)
    calls: dict[str, Callable[[], object]] = {
        "stage": lambda: wrap(world, stage=4),
        "accumulate": lambda: wrap(world, accumulate="global"),
        "both": lambda: wrap(world, accumulate="sharded", exact=True),
        "size": lambda: wrap(world, bucket_size_mb=-1.0),
        "part": lambda: wrap(world, units=[strange]),
        "root": lambda: wrap(world, module := ToyModel(), units=[module]),  # type: ignore[misc]
        "complex": lambda: wrap(world, nn.Linear(2, 2, dtype=torch.complex64)),
    }
    return {which: said_by(call, ValueError) for which, call in calls.items()}


def test_settings_that_cannot_be_are_refused_on_every_rank(on_ranks):
    first, second = on_ranks(2, refused_settings)
    assert first == second
    assert first == {
        "stage": "stage must be 1, 2 or 3, got 4",
        "accumulate": "accumulate must be 'local' or 'sharded', got 'global'",
        "both": "exact sums need whole gradients on each rank, but accumulate is 'sharded'; drop one of the two",
        "size": "bucket_size_mb must be a number of MB, or None for one bucket, got -1.0",
        "part": "units[0]: a Linear that is not a part of the module; pass parts of it",
        "root": "units[0] is the module itself, which is the root unit; pass parts of it",
        "complex": (
            "weight is torch.complex64, but shards must be real; use its torch.view_as_real() as the parameter"
        ),
    }


def differing(world: World) -> list[str]:
    """Rank 1 requests something else each time."""
    module = seeded(ToyModel, 1)
    others: list[dict] = [
        {"stage": 1},
        {"accumulate": "sharded"},
        {"bucket_size_mb": 1.0},
        {"units": [module.fc1]},
        {"reshard_after_forward": False},
        {"module": nn.Linear(2, 2)},
    ]
    return [
        said_by(lambda: wrap(world, **({"module": module, **other} if world.rank == 1 else {})), ValueError)  # noqa: B023
        for other in others
    ]


def test_ranks_that_differ_are_told_how_on_all(on_ranks):
    told = [
        ("setting stage=2", "setting stage=1"),
        ("setting accumulate=local", "setting accumulate=sharded"),
        (f"setting bucket_size_mb={SMALL_MB}", "setting bucket_size_mb=1.0"),
        ("setting units=default", "setting units=[['fc1']]"),
        ("setting reshard_after_forward=True", "setting reshard_after_forward=False"),
        ("parameter fc1.weight (20, 10) float32 trainable", "parameter weight (2, 2) float32 trainable"),
    ]
    for rank, found in enumerate(on_ranks(2, differing)):
        for (zero, one), said in zip(told, found, strict=True):
            here = [" (here)" if rank == each else "" for each in (0, 1)]
            assert said.startswith("the ranks' modules or wrappers differ: ")
            assert f"{zero} on rank 0{here[0]} but {one} on rank 1{here[1]}; " in said


def changed(world: World) -> dict[str, str]:
    changes: dict[str, Callable[[nn.Module], object]] = {
        "frozen": lambda module: module.fc1.requires_grad_(False),
        "replaced": lambda module: setattr(module, "fc2", nn.Linear(20, 5, bias=False)),
        "converted": lambda module: module.norm.double(),
        "moved": lambda module: module.norm.to("meta"),
    }
    found = {}
    for which, change in changes.items():
        for stage in (1, 2):
            model = wrap(world, stage=stage)
            change(model.module)
            found[f"{which} {stage}"] = said_by(lambda: model(torch.ones(2, 10)), RuntimeError)  # noqa: B023
    thawed = seeded(ToyModel, 1)
    thawed.fc2.requires_grad_(False)
    model = wrap(world, thawed)
    thawed.fc2.requires_grad_(True)
    found["thawed 2"] = said_by(lambda: model(torch.ones(2, 10)), RuntimeError)
    return found


def test_parameters_that_change_after_wrapping_are_named(on_ranks):
    names = {"frozen": "fc1.weight", "replaced": "fc2.weight", "thawed": "fc2.weight"}
    for which, said in on_ranks(1, changed)[0].items():
        assert said == (
            f"{names.get(which.split()[0], 'norm.bias, norm.weight')}: changed after the module was sharded; freeze, "
            "replace and convert parameters before wrapping, or get the module back with unwrap(), change it, and "
            "build a new wrapper and optimizer"
        )


def misused(world: World) -> dict[str, str]:
    found = {}
    for stage in (1, 2):
        never = CASES["never used"]
        model = wrap(world, never.build(1), stage=stage)
        found[f"unused {stage}"] = said_by(lambda: never.loss(model, 0).backward(), RuntimeError)  # noqa: B023
        module = nn.Sequential(nn.Embedding(64, 16, sparse=True))
        model = wrap(world, module, stage=stage, bucket_size_mb=0.0)
        found[f"sparse {stage}"] = said_by(model(torch.ones(1, dtype=torch.long)).sum().backward, RuntimeError)
        model = wrap(world, stage=stage)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        loss = TOY.loss(model, world.rank)
        loss.backward(retain_graph=True)
        optimizer.step()
        found[f"old graph {stage}"] = said_by(loss.backward, RuntimeError)
        model.synchronize()
    return found


def test_misuse_in_a_step_is_told(on_ranks):
    for found in on_ranks(2, misused):
        for stage in (1, 2):
            assert found[f"unused {stage}"].startswith("1 of 3 parameters got no gradient on any rank: sometimes; if ")
            assert found[f"sparse {stage}"].startswith(
                "0.weight: its gradient is sparse, but only dense gradients are averaged;"
            )
            assert "modified by an inplace operation" in found[f"old graph {stage}"]  # like torch without a wrapper


def absent(world: World) -> list[str]:
    """All run a step. Then rank 1 runs only the backward, and the others wait for its parameters."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = ShardedDataParallel(seeded(ToyModel, 1), group, stage=2)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    for step in range(2):
        TOY.loss(model, world.rank).backward()
        if step == 0:
            optimizer.step()
    said = []
    if world.rank != 1:
        with mock.patch.object(timeouts, "LATER_S", 1.5):  # enough to read the other rank's report
            optimizer.step()
            said = [said_by(lambda: model(torch.ones(2, 10)), RuntimeError)]
    dist.barrier()
    return said


def test_a_gather_to_which_a_rank_does_not_come_is_named(on_ranks):
    first, late, last = on_ranks(3, absent)
    assert late == []
    told = [said for said in (*first, *last) if "did not end within" in said]
    assert told  # the other rank may have lost its connection to the first
    for said in told:
        assert ": synchronization 2: flat parameters 1 of 1 (fc2.weight ... fc1.weight; " in said
        assert "it was not entered by rank 1: " in said
    for said in (*first, *last):
        assert ": synchronization 2: flat parameters 1 of 1 (fc2.weight ... fc1.weight; " in said


def failing(world: World) -> list[str]:
    """The first of four buckets fails while the third is prepared, and every time it is waited for."""

    def times_out(*_: object) -> None:
        raise RuntimeError("[gloo] Timed out waiting 700ms for recv operation to complete")

    said = []
    model = wrap(world, CASES["chain"].build(1), bucket_size_mb=16 / 1024)
    told: list[bool] = []
    model.on_wait = told.append
    with (
        mock.patch.object(scatter, "ring_reduce_scatter", times_out),
        mock.patch.multiple(timeouts, LATER_S=0.0),
    ):
        said.append(said_by(lambda: CASES["chain"].loss(model, 0).backward(), RuntimeError))
        said.append(said_by(lambda: CASES["chain"].loss(model, 0).backward(), RuntimeError))
    return said if told == [True, False] * (len(told) // 2) else [str(told)]


def test_a_bucket_that_fails_during_the_backward_is_named_every_time(on_ranks):
    for found in on_ranks(2, failing):
        assert len(found) == 2
        for said in found:
            assert "synchronization 1: bucket 1 of 4 (layers.3.weight; 0.0156 MB) " in said


def uneven(world: World) -> list[str]:
    """Rank 1 runs one step less, then saves or evaluates. Nothing may be sent that the others do not expect."""
    said = []
    for near in (True, False):
        for then in ("save", "evaluate"):
            with nullcontext() if near else mock.patch.object(data_parallel, "shared_memory_peers", return_value=None):
                model = wrap(world, stage=3)
            for step in range(2 if world.rank == 1 else 3):
                loss = said_by(lambda: TOY.loss(model, 0).backward(), RuntimeError)  # noqa: B023
                said += [loss] if step == 2 else []
            if world.rank == 1:
                with torch.no_grad():
                    use = model.state_dict if then == "save" else lambda: TOY.loss(model, 0)  # noqa: B023
                    said.append(said_by(use, RuntimeError))
    return said


def test_ranks_that_take_other_numbers_of_steps_are_named_on_all(on_ranks):
    # gloo used to abort one of the processes, because a message was longer than expected.
    first, second, third = on_ranks(3, uneven)
    assert first == second == third
    others = ["gather_full() or a state dict", "a forward without gradients"] * 2
    assert [each.partition(".")[0] for each in first] == [
        f"the ranks begin different operations: rank 0: forward 3 with gradients; rank 1: {other}; "
        "rank 2: forward 3 with gradients"
        for other in others
    ]
