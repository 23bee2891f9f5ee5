"""benchmarks/step_time.py at a small scale: what a rank measures on real ranks, and how it is judged."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import ddp_models
import pipe_sides
import step_time
import train_sides

from muster.jobs.world.world import World
from muster.pipe.schedules.tables import schedule

pytestmark = [pytest.mark.command, pytest.mark.slow]

# (group, size, sides): fsdp2 and PyTorch's pipelines take 2 s to import.
CELLS = (
    ("ddp", "vgg11", step_time.GROUPS["ddp"].sides),
    ("ddp", "gpt-5m", ("bucketed", "ddp")),
    ("zero1", "vgg11", step_time.GROUPS["zero1"].sides),
    ("zero3", "gpt-5m", ("zero3", "ddp")),
    ("zero bubble", "d128", ("1f1b", "gpipe", "zbv")),
)


class Doubled(pipe_sides.LoopSide):
    """A loop that counts a micro-batch twice."""

    def step(self, inputs, targets):
        loss = super().step(inputs, targets)
        super().step(inputs[:8], targets[:8])
        return loss


def small(world: World) -> list:
    found = [step_time.measure(group, sides, size, 2, 1, tiny=True) for group, size, sides in CELLS]
    return [found, other_batch(world.rank), fitted()]


def other_batch(rank: int) -> float:
    """Train a side on another batch; return how far its gradients are."""
    task = ddp_models.TINY["gpt-5m"]
    loops = [train_sides.Loop(side, task.build(), task.batches(rank)) for side in ("bucketed", "ddp")]
    loops[0].step()
    next(loops[1].batches)
    loops[1].step()
    return train_sides.apart([loop.gradients() for loop in loops])


def fitted() -> bool:
    """Fit a zero bubble's table; tell whether it is the one for what was measured."""
    task = pipe_sides.TINY
    side = pipe_sides.OurSide("zbv", task.layers(), 8)
    stream = task.batches(8)
    costs = side.fit(task.layers(), [next(stream) for _ in range(2)])
    return side.pipeline.schedule == schedule("zbv", 2, 8, costs=costs)


@pytest.mark.ranks
def test_all_sides_do_the_same_work_and_all_of_them_are_timed(on_ranks):
    (mine, far, one_is), (theirs, _, other_is) = on_ranks(2, small)
    assert mine == theirs  # CPU time is the sum of all ranks, wall time the slowest one's
    for found, (_, size, sides) in zip(mine, CELLS, strict=True):
        assert {side: len(times) for side, times in found["times"].items()} == dict.fromkeys(sides, 2)
        assert all(seconds > 0 for times in found["times"].values() for pair in times for seconds in pair)
        rows = step_time.rows_of("here", 2, size, found, 1)
        assert rows
        assert all(row["agree"] for row in rows)
    assert list(mine[-1]["costs_s"]) == ["zbv"]  # the others' tables depend on no costs
    assert min(mine[-1]["costs_s"]["zbv"]["weight_gradient"]) > 0
    assert (one_is, other_is) == (True, True)
    assert far > 100 * step_time.LIMITS["gradients"]


@pytest.mark.ranks
def test_other_work_of_a_pipeline_is_seen(on_ranks):
    assert max(on_ranks(1, doubled)) > step_time.LIMITS["loop"]


def doubled(world: World) -> float:
    task = pipe_sides.TINY
    loop, other = (kind(task.layers(), 8) for kind in (pipe_sides.LoopSide, Doubled))
    return step_time.apart_of(other, loop, next(task.batches(8)))


@pytest.mark.parametrize(
    ("ours", "theirs", "size", "ranks", "cpu", "wall", "reach", "reached"),
    [
        ("bucketed", "ddp", "vgg11", 4, 1.00, 1.03, (1.00, 1.03), True),
        ("bucketed", "ddp", "vgg11", 4, 1.01, 1.00, (1.00, 1.03), False),
        ("bucketed", "ddp", "vgg11", 4, 0.90, 1.04, (1.00, 1.03), False),
        ("bucketed", "ddp, buffers", "vgg11", 4, 9.0, 9.0, None, True),
        ("zero1", "zero, defaults", "gpt-5m", 2, 0.85, 0.85, (0.85, 0.85), True),
        ("zero1", "zero, defaults", "vgg11", 2, 0.85, 0.83, (0.83, 0.83), False),
        ("zero1", "zero, tuned", "gpt-5m", 2, 0.80, 0.98, (0.97, 0.97), False),
        ("zero2", "zero, tuned", "gpt-5m", 2, 9.0, 9.0, None, True),
        ("1f1b", "torch 1f1b", "d256", 2, 1.0, 1.0, (1.0, 1.0), True),
        ("1f1b", "torch 1f1b", "d256", 4, 0.9, 1.01, (1.0, 1.0), False),
        ("1f1b", "torch 1f1b", "d256", 8, 2.0, 2.0, None, True),
        ("zb1p", "torch zb", "d128", 4, 2.0, 2.0, None, True),
        ("zbv", "torch zbv", "d128", 2, 0.81, 0.8, (0.8, 0.8), False),
    ],
)
def test_a_claim_holds_where_both_clocks_reach_it(ours, theirs, size, ranks, cpu, wall, reach, reached, capsys):
    times = {ours: [(cpu, wall)] * 3, theirs: [(1.0, 1.0)] * 3}
    apart = {key: {"gradients": 0.0, "weights": 0.01} for key in times}
    (row,) = step_time.rows_of("here", ranks, size, {"times": times, "apart": apart, "costs_s": {}}, 1)
    assert (row["ours"], row["against"], row["reach"], row["reached"]) == (ours, theirs, reach, reached)
    step_time.show([row])
    assert "NOT the same work" not in capsys.readouterr().out
    apart = {ours: {"weights": 0.1}, theirs: {"weights": 0.0}}
    (row,) = step_time.rows_of("here", ranks, size, {"times": times, "apart": apart, "costs_s": {}}, 1)
    assert not row["reached"]
    step_time.show([row])
    assert "NOT the same work" in capsys.readouterr().out


def test_blocks_are_dealt_evenly_and_what_borders_goes_with_them():
    layers = pipe_sides.TINY.layers()
    assert pipe_sides.cut_evenly(layers, 1) == (0,)
    assert pipe_sides.cut_evenly(layers, 2) == (0, 5)  # embed and 4 blocks, 4 blocks, norm and head
    assert pipe_sides.cut_evenly(layers, 4) == (0, 3, 5, 7)
    with pytest.raises(ValueError, match="8 blocks cannot be dealt evenly to 3"):
        pipe_sides.cut_evenly(layers, 3)
