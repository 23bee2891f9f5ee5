"""The benchmarks of `ddp` at a small scale: what a rank measures on real ranks, and how it is judged."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import ddp_exposed
import ddp_memory
import ddp_models
import ddp_step
import step_sides

from muster.jobs.world.world import World

pytestmark = pytest.mark.slow


def steps(world: World) -> dict:
    return {model: ddp_step.measure(model, repeats=2, steps=1, tiny=True) for model in ddp_step.SIDES}


@pytest.mark.ranks
def test_all_sides_train_the_same_model(on_ranks):
    mine, theirs = on_ranks(2, steps)
    assert mine == theirs  # CPU time is the sum of all ranks, wall time the slowest one's
    for model, sides in ddp_step.SIDES.items():
        found = mine[model]
        assert found["apart"]["gradients"] <= ddp_step.SAME_GRADIENTS
        assert found["apart"]["weights"] <= ddp_step.SAME_WEIGHTS
        assert {side: len(times) for side, times in found["times"].items()} == dict.fromkeys(sides, 2)
        assert all(seconds > 0 for times in found["times"].values() for pair in times for seconds in pair)


def other_work(world: World) -> float:
    task = ddp_models.TINY["gpt-5m"]
    loops = [ddp_models.Loop(task.build(), side, task.batches(world.rank)) for side in ("ours", "torch")]
    loops[0].step()
    next(loops[1].batches)
    loops[1].step()
    return step_sides.apart([loop.gradients() for loop in loops])


@pytest.mark.ranks
def test_sides_that_do_other_work_are_told(on_ranks):
    assert min(on_ranks(2, other_work)) > 100 * ddp_step.SAME_GRADIENTS


def found(cpu: float, wall: float, weights: float = 0.0) -> dict:
    times = {"ours": [(cpu, wall)] * 3, "torch": [(1.0, 1.0)] * 3, "torch, buffers": [(2.0, 2.0)] * 3}
    return {"times": times, "apart": {"gradients": 0.0, "weights": weights}}


@pytest.mark.parametrize(
    ("measured", "reached"),
    [
        (found(1.0, 1.03), True),
        (found(1.01, 1.0), False),
        (found(0.9, 1.04), False),
        (found(0.9, 0.9, weights=0.1), False),
    ],
)
def test_the_claim_is_against_torch_without_its_buffers(measured, reached, capsys):
    claim, default = ddp_step.rows_of("here", "vgg11", measured)
    assert (claim["claim"], claim["reached"]) == (True, reached)
    assert default["claim"] is False
    assert default["cpu"]["ratio"] == claim["cpu"]["ratio"] / 2
    ddp_step.show([claim, default], steps=1)
    assert capsys.readouterr().out.count("NOT the same work") == (0 if claim["agree"] else 2)


def exposed(world: World) -> list:
    return ddp_exposed.measure([0.001, 25.0], repeats=2, samples=1, tiny=True)


@pytest.mark.ranks
def test_exposed_communication_is_measured_beside_what_it_is_compared_with(on_ranks):
    mine, theirs = on_ranks(2, exposed)
    assert mine == theirs
    small, large = ddp_exposed.judged(mine)
    assert small["buckets"] > large["buckets"] == 1
    assert (small["held"], large["held"]) == (True, False)
    assert all(len(row[name]) == 2 for row in mine for name in ("exposed", "communication", "backward"))
    assert all(seconds > 0 for row in mine for name in ("communication", "backward") for seconds in row[name])


def test_exposed_is_in_reach_only_where_the_backward_is_as_long_as_the_communication():
    row = {"exposed": [0.2, 0.2, 0.9], "communication": [1.0] * 3}
    alike, short = ddp_exposed.judged([{**row, "backward": [0.9] * 3}])[0], {**row, "backward": [0.5] * 3}
    assert (alike["ratio"], alike["reached"]) == (0.2, True)
    assert ddp_exposed.judged([short])[0]["reached"] is False


def test_the_batch_is_found_whose_backward_takes_as_long_as_asked():
    assert ddp_exposed.samples_for(0.46, lambda samples: 0.06 + 0.02 * samples) in (20, 23)
    assert ddp_exposed.samples_for(0.001, lambda samples: 0.06 + 0.02 * samples) == 1


def memory(world: World) -> list:
    return [ddp_memory.measure("gpt-5m", side, tiny=True) for side in ("ours", "torch")]


@pytest.mark.ranks
def test_memory_grows_less_than_it_is_in_all(on_ranks):
    mine, theirs = on_ranks(2, memory)
    assert mine == theirs  # the ranks' mean
    assert all(0 <= side["growth"] < side["peak"] for side in mine)
    json.dumps(mine)
