"""benchmarks/exposed.py at a small scale: sides in turns, and how they are judged."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import exposed

from muster.jobs.world.world import World

pytestmark = pytest.mark.command


def buckets(world: World) -> list:
    return exposed.measure_ddp([0.001, 25.0], repeats=2, samples=1, tiny=True)


@pytest.mark.ranks
@pytest.mark.slow
def test_exposed_communication_is_measured_beside_what_it_is_compared_with(on_ranks):
    mine, theirs = on_ranks(2, buckets)
    assert mine == theirs
    small, large = exposed.judged_ddp(mine)
    assert small["buckets"] > large["buckets"] == 1
    assert (small["held"], large["held"]) == (True, False)
    assert all(len(row[name]) == 2 for row in mine for name in ("exposed", "communication", "backward"))
    assert all(seconds > 0 for row in mine for name in ("communication", "backward") for seconds in row[name])


def test_exposed_is_in_reach_only_where_the_backward_is_as_long_as_the_communication():
    row = {"exposed": [0.2, 0.2, 0.9], "communication": [1.0] * 3}
    (alike,), (short,) = (exposed.judged_ddp([{**row, "backward": [each] * 3}]) for each in (0.9, 0.5))
    assert (alike["ratio"], alike["reached"]) == (0.2, True)
    assert short["reached"] is False


def test_the_batch_is_found_whose_backward_takes_as_long_as_asked():
    assert exposed.samples_for(0.46, lambda samples: 0.06 + 0.02 * samples) in (20, 23)
    assert exposed.samples_for(0.001, lambda samples: 0.06 + 0.02 * samples) == 1


def averaging(world: World) -> list:
    return exposed.measure_pipe(["1f1b"], repeats=1, microbatches=2, tiny=True)


@pytest.mark.ranks
def test_what_follows_the_last_backward_is_measured_for_all_sides(on_ranks):
    (row,), *others = on_ranks(4, averaging)
    assert all(each == [row] for each in others), "times of the slowest rank, on a clock that all have"
    assert set(row["times"]) == set(exposed.SIDES)
    for times in row["times"].values():
        ((step,), (took,)) = times["step"], times["exposed"]
        assert 0 < took < step
    json.dumps(exposed.judged_pipe(row))


@pytest.mark.parametrize(("bucketed", "reached"), [(0.1, True), (0.3, False)])
def test_buckets_may_expose_no_more_than_one_message(bucketed, reached, capsys):
    took = {"flat": 0.2, "bucketed": bucketed, "zero1": 0.1, "alone": 0.0}
    times = {name: {"step": [1.0] * 3, "exposed": [each] * 3} for name, each in took.items()}
    row = exposed.judged_pipe({"schedule": "1f1b", "microbatches": 8, "times": times})
    assert (row["ratio"], row["reached"]) == (pytest.approx(bucketed / 0.2), reached)
    exposed.show([row], "here")
    assert ("yes" in capsys.readouterr().out) is reached
