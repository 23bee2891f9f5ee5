"""Random numbers in a one-process pipeline depend only on the seed, not on thread timing."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from muster.pipe import Pipe
from muster.pipe.local.turns import Turns
from support.local_pipes import PATIENCE_S, Doing, pipe_of


class Timed(nn.Module):
    """Lets another stage's thread run first, if both run concurrently."""

    def __init__(self, gate: list[threading.Event], *, waits: bool) -> None:
        super().__init__()
        self.gate, self.waits = gate, waits

    def forward(self, x: Tensor) -> Tensor:
        if self.gate and self.waits:
            self.gate[0].wait(0.02)  # until the other stage has drawn; times out if that one must wait for its turn
        return x


class Drawn(nn.Module):
    """Dropout that signals when it has drawn."""

    def __init__(self, gate: list[threading.Event]) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x, 0.5, self.training)
        if self.gate:
            self.gate[0].set()
        return x


def drawn(late: int | None) -> list[Tensor]:
    """Return the masks of two forwards in which stage `late` draws last, unless turns prevent this."""
    gate = [] if late is None else [threading.Event()]
    stages = [nn.Sequential(Timed(gate, waits=number == late), Drawn(gate)) for number in range(2)]
    model = pipe_of(nn.Identity(), *stages, chunks=4)
    torch.manual_seed(3)
    return [model(torch.ones(8, 16)) for _ in range(2)]


def test_masks_do_not_depend_on_which_thread_comes_first():
    wanted = drawn(None)
    assert not torch.equal(*wanted)
    for late in (0, 1):
        assert all(map(torch.equal, drawn(late), wanted))


def test_a_recomputed_stage_draws_the_masks_of_its_forward():
    """Checkpointing reads the generator's state, then draws: no other stage may draw in between."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    for inner in (True, False):
        torch.manual_seed(5)
        model = pipe_of(
            nn.Dropout(0.5),
            Doing(lambda x, inner=inner: checkpoint(layer, x, use_reentrant=False) if inner else layer(x)),
            nn.Dropout(0.5),
            chunks=6,
        )
        model(torch.ones(12, 4)).sum().backward()
        found = layer[0].weight.grad
        layer.zero_grad()
        if inner:
            recomputed = found
    assert torch.equal(recomputed, found)


def test_who_does_not_draw_runs_beside_one_that_does_and_who_begins_to_is_seen():
    barrier, meets = threading.Barrier(2), [False]

    def meet(x: Tensor) -> Tensor:
        if meets[0] and not x[0, 0]:
            barrier.wait(PATIENCE_S)
        return x

    model = pipe_of(
        Doing(lambda x: meet(x) if x[0, 0] == 1 else x), nn.Sequential(Doing(lambda x: meet(x)), nn.Dropout()), chunks=2
    )
    model.eval()(torch.tensor([[0.0], [1.0]]))
    model.train()
    keys = model._turns.keys(model.stages)
    model(torch.zeros(2, 1))
    assert [model._turns._draws[key] for key in keys] == [False, True]


@pytest.mark.parametrize("draws", [(True, True, False), (False, False, False), (False, True, True)])
def test_waves_have_one_stage_that_draws_at_most_and_lowest_stages_draw_first(draws: tuple[bool, ...]):
    turns, stages = Turns([torch.device("cpu")] * 3), [nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)]
    keys = turns.keys(stages)

    def run(tick: list[int]) -> list[list[int]]:
        made: list[list[int]] = []
        for wave in turns.waves(keys, tick):
            made.append(wave)
            for stage in wave:
                torch.rand(()) if draws[stage] else None
        return made

    assert run([0]) == [[0]]
    run([1, 0])
    assert run([2, 1, 0]) in ([[0], [1], [2]], [[0, 1, 2]], [[0, 1], [2]])
    quiet = [stage for stage in range(3) if not draws[stage]]
    drawing = [stage for stage in range(3) if draws[stage]]
    wanted = [[*quiet, drawing[0]], *([each] for each in drawing[1:])] if drawing else [quiet]
    assert run([0, 1, 2]) == wanted


def test_a_stage_that_begins_to_draw_is_looked_at_anew():
    turns, stages = Turns([torch.device("cpu")] * 2), [nn.Linear(1, 1), nn.Linear(1, 1)]
    keys = turns.keys(stages)

    def run(*drawing: int) -> list[Any]:
        made = []
        for wave in turns.waves(keys, [0, 1]):
            made.append(wave)
            for stage in wave:
                torch.rand(()) if stage in drawing else None
        return made

    assert [run(), run(), run(1), run(1), run(1)] == [[[0], [1]], [[0, 1]], [[0, 1]], [[0], [1]], [[0, 1]]]


def test_a_pipe_on_the_same_seed_is_the_same_pipe():
    def made() -> list[Tensor]:
        torch.manual_seed(1)
        model = Pipe(
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(4))), 8, devices=["cpu"] * 4
        )
        return [model(torch.ones(16, 8)) for _ in range(3)]

    assert all(map(torch.equal, made(), made()))
