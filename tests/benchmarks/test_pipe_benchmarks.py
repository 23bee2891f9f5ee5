"""The benchmarks of `pipe` at a small scale: what a rank measures on real ranks, and how it is judged."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import pipe_memory
import pipe_sides
import pipe_step
import torch
from gpu_pipe_rows import PIPE_ROWS
from gpu_pipes import worst_of

from muster.jobs.world.world import World
from muster.pipe.schedules.tables import schedule

pytestmark = pytest.mark.slow

KINDS = ("1f1b", "gpipe", "zbv")  # PyTorch's take 2 s to import


class Doubled(pipe_sides.LoopSide):
    """A loop that counts a micro-batch twice."""

    def step(self, inputs, targets):
        loss = super().step(inputs, targets)
        super().step(inputs[:8], targets[:8])
        return loss


def small(world: World) -> list:
    found = pipe_step.measure("d128", KINDS, repeats=2, steps=1, tiny=True)
    held = {kind: pipe_memory.in_flight(kind, pipe_sides.TINY, 8) for kind in KINDS[:2]}
    return [found, held, fitted()]


def fitted() -> bool:
    """Fit a zero bubble's table; tell whether it is the one for what was measured."""
    task = pipe_sides.TINY
    side = pipe_sides.OurSide("zbv", task.layers(), 8)
    stream = task.batches(8)
    costs = side.fit(task.layers(), [next(stream) for _ in range(2)])
    return side.pipeline.schedule == schedule("zbv", 2, 8, costs=costs)


@pytest.mark.ranks
def test_all_sides_do_the_work_of_a_loop_and_all_of_them_are_timed(on_ranks):
    (mine, first, one_is), (theirs, second, other_is) = on_ranks(2, small)
    assert mine == theirs  # CPU time is the sum of all ranks, wall time the slowest one's
    assert {kind: len(times) for kind, times in mine["times"].items()} == dict.fromkeys(KINDS, 2)
    assert max(mine["apart"].values()) <= pipe_step.SAME
    assert list(mine["costs_s"]) == ["zbv"]  # the others' tables depend on no costs
    assert min(mine["costs_s"]["zbv"]["weight_gradient"]) > 0
    assert (one_is, other_is) == (True, True)
    for stage, held in enumerate((first, second)):
        share = held["1f1b"] / held["gpipe"]
        assert 0.8 * pipe_memory.bound(2, stage, 8) < share < 0.6  # what does not grow with micro-batches is large here


@pytest.mark.ranks
def test_other_work_is_seen(on_ranks):
    assert max(on_ranks(1, doubled)) > pipe_step.SAME


def doubled(world: World) -> float:
    task = pipe_sides.TINY
    loop, other = (kind(task.layers(), 8) for kind in (pipe_sides.LoopSide, Doubled))
    return pipe_step.apart_of(other, loop, next(task.batches(8)))


def test_blocks_are_dealt_evenly_and_what_borders_goes_with_them():
    layers = pipe_sides.TINY.layers()
    assert pipe_sides.cut_evenly(layers, 1) == (0,)
    assert pipe_sides.cut_evenly(layers, 2) == (0, 5)  # embed and 4 blocks, 4 blocks, norm and head
    assert pipe_sides.cut_evenly(layers, 4) == (0, 3, 5, 7)
    with pytest.raises(ValueError, match="8 blocks cannot be dealt evenly to 3"):
        pipe_sides.cut_evenly(layers, 3)


def test_memory_counts_storages_while_they_live():
    living = pipe_memory.Living()
    with living:
        kept = torch.zeros(1000)
        view = kept[10:]
        gone = torch.zeros(500) + 1
        assert living.total([]) == 4 * 1500
        del gone
        assert living.total([]) == 4 * 1000
        del kept
        assert living.total([]) == 4 * 1000  # a view keeps it
        assert living.total([view]) == 0
        del view
    assert living.total([]) == 0


def found(**sides: tuple[float, float]) -> dict:
    times = {side.replace("_", " ").strip(): [pair] * 3 for side, pair in sides.items()}
    return {"times": times, "apart": dict.fromkeys(times, 0.0), "costs_s": {}}


@pytest.mark.parametrize(
    ("cpu", "wall", "ranks", "reached"),
    [(1.0, 1.0, 2, True), (1.01, 0.9, 2, False), (0.9, 1.01, 4, False), (2.0, 2.0, 3, True)],
)
def test_a_claim_holds_where_both_clocks_reach_it(cpu, wall, ranks, reached, capsys):
    measured = found(_1f1b=(cpu, wall), torch_1f1b=(1.0, 1.0))
    (row,) = pipe_step.rows_of(ranks, "d256", [measured], steps=1)
    assert (row["ours"], row["reached"]) == ("1f1b", reached)
    pipe_step.show([row])
    assert "NOT the same work" not in capsys.readouterr().out


def test_other_work_is_no_claim(capsys):
    measured = {**found(zb1p=(0.1, 0.1), torch_zb=(1.0, 1.0)), "apart": {"zb1p": 0.1, "torch zb": 0.0}}
    (row,) = pipe_step.rows_of(2, "d128", [measured], steps=1)
    assert not row["reached"]
    pipe_step.show([row])
    assert "NOT the same work" in capsys.readouterr().out


def test_memory_is_held_to_the_bound_on_every_stage():
    held = {"gpipe": [1600, 1600], "1f1b": [220, 111], "torch gpipe": [1600, 1600], "torch 1f1b": [800, 800]}
    rows = pipe_memory.rows_of(2, 16, held)
    assert [(row["side"], row["stage"], row["reached"]) for row in rows] == [
        ("ours", 0, True),
        ("ours", 1, False),
        ("torch", 0, True),  # beside
        ("torch", 1, True),
    ]


def test_gradients_on_gpus_are_compared_parameter_by_parameter():
    assert worst_of({"a": 1.0, "b": 2.2, "tiny": 9.0}, {"a": 1.0, "b": 2.0, "tiny": 1e-9}) == pytest.approx(0.1)
    assert worst_of({"a": 1.0}, {"a": 1.0, "b": 1.0}) == float("inf")
    assert worst_of({"a": float("nan")}, {"a": 1.0}) == float("inf")


def test_rows_of_gpus_hold_one_side_of_ours_and_claims_name_sides():
    for row in PIPE_ROWS.values():
        names = [each["name"] for each in row.specs]
        assert sum(bool(each.get("held")) for each in row.specs) == 1
        assert any(each["kind"].startswith("torch") for each in row.specs)
        assert len(set(names)) == len(names)
        assert all({ours, other} <= set(names) for ours, other, _ in row.claims)
        assert row.microbatches > 0
