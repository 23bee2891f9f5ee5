"""Tests of the tests: these checks must detect mistakes in a one-process pipeline."""

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from muster.pipe import Pipe
from muster.pipe.local import pipe as local
from muster.pipe.local.nested import join
from muster.pipe.local.turns import Turns
from support.local_pipes import PATIENCE_S, Doing, mlp, pipe_of

SOON_S = 0.1  # how long threads wait for an event that must not happen


def wrong_numbers(_: float) -> list[str]:
    """Outputs and gradients must equal the module's, and batch norms must see micro-batches."""
    module = mlp(3, 3, 3)
    reference, inputs = copy.deepcopy(module), torch.randn(7, 3, dtype=torch.float64)
    output, wanted = Pipe(module, 3, devices=["cpu"] * 2)(inputs), reference(inputs)
    problems = [] if torch.allclose(output, wanted) else ["outputs"]
    output.square().mean().backward()
    wanted.square().mean().backward()
    for (name, found), right in zip(module.named_parameters(), reference.parameters(), strict=True):
        problems += [] if torch.allclose(found.grad, right.grad) else [f"gradient of {name}"]  # type: ignore[arg-type]
    norm = nn.BatchNorm1d(2)
    pipe_of(norm, nn.Identity(), chunks=3)(torch.randn(6, 2))
    return problems + ([] if norm.num_batches_tracked == 3 else [f"{norm.num_batches_tracked} micro-batches"])


def wrong_threads(patience_s: float) -> list[str]:
    """Two stages must run concurrently, each on its own thread."""
    barrier, threads = threading.Barrier(2), set()

    def meet(x: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        barrier.wait(patience_s)
        return x

    first, last = (Doing(lambda x, alone=alone: x if x[0, 0] == alone else meet(x)) for alone in (0, 3))
    try:
        pipe_of(first, last)(torch.arange(4.0).reshape(4, 1))
    except threading.BrokenBarrierError:
        return ["stages are not at work at once"]
    return [] if len(threads) == 2 and threading.get_ident() not in threads else ["threads"]


def wrong_draws(patience_s: float) -> list[str]:
    """A stage that would draw after a later stage of its tick, if not prevented, must still get its own masks."""
    drawn, inputs, drop = threading.Event(), torch.tensor([1.0, 2.0])[:, None].expand(2, 64), nn.Dropout()
    wait = Doing(lambda x: (drawn.wait(patience_s) if x[0, 0] == 2.0 else None, x)[1])
    tell = Doing(lambda x: (drawn.set(), x)[1])
    model = pipe_of(nn.Sequential(wait, drop), nn.Sequential(drop, tell), chunks=2)
    torch.manual_seed(0)
    found = model(inputs)
    torch.manual_seed(0)
    hidden = [drop(inputs[:1]), drop(inputs[1:])]  # tick 0, tick 1
    wanted = torch.cat([drop(hidden[0]), drop(hidden[1])])  # tick 1, tick 2
    return [] if torch.equal(found, wanted) else ["masks"]


CHECKS = {"numbers": wrong_numbers, "threads": wrong_threads, "draws": wrong_draws}


def just_calls_the_module() -> Any:
    return mock.patch.object(Pipe, "forward", lambda pipe, value: pipe.module(value))


def only_the_last_counts() -> Any:
    return mock.patch.object(local, "join", lambda values: join([*(each.detach() for each in values[:-1]), values[-1]]))


def cut_short() -> Any:
    made = local.clock_cycles
    return mock.patch.object(local, "clock_cycles", lambda *sizes: list(made(*sizes))[:-1])


def all_count_as_whole_batches() -> Any:
    """The loss is not divided by the number of micro-batches."""

    def joined(values: list[Tensor]) -> Tensor:
        output = join(values)
        output.register_hook(lambda gradient: gradient * len(values)) if output.requires_grad else None
        return output

    return mock.patch.object(local, "join", joined)


def one_stage_after_the_other() -> Any:
    made = Turns.waves

    def waves(*arguments: Any) -> Iterator[list[int]]:
        for wave in made(*arguments):
            yield from ([stage] for stage in wave)

    return mock.patch.object(Turns, "waves", waves)


def all_draw_at_once() -> Any:
    return mock.patch.object(Turns, "waves", lambda turns, keys, tick: iter([sorted(tick)]))


MUTATIONS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "just calls the module": (just_calls_the_module, {"numbers", "threads"}),
    "only the last counts": (only_the_last_counts, {"numbers"}),
    "cut short": (cut_short, {"numbers"}),
    "1/m missing": (all_count_as_whole_batches, {"numbers"}),
    "one after the other": (one_stage_after_the_other, {"threads"}),
    "draws at once": (all_draw_at_once, {"draws"}),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mistake_is_reported(name: str):
    mutation, where = MUTATIONS[name]
    with mutation():
        patience_s = {"threads": SOON_S, "draws": PATIENCE_S}
        assert {check for check in where if CHECKS[check](patience_s.get(check, 0.0))} == where


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_mistake_nothing_is_reported(check: str):
    assert CHECKS[check](PATIENCE_S if check == "threads" else SOON_S) == []
