"""benchmarks/pipe_averaging.py at a small scale: sides in turns, and how they are judged."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import pipe_averaging

from muster.jobs.world.world import World


def measured(world: World) -> list[dict[str, Any]]:
    return pipe_averaging.measure(["1f1b"], repeats=1, microbatches=2, tiny=True)


@pytest.mark.ranks
def test_what_follows_the_last_backward_is_measured_for_all_sides(on_ranks: Any):
    (row,), *others = on_ranks(4, measured)
    assert all(each == [row] for each in others), "times of the slowest rank, on a clock that all have"
    assert set(row["times"]) == set(pipe_averaging.SIDES)
    for times in row["times"].values():
        ((step,), (exposed,)) = times["step"], times["exposed"]
        assert 0 < exposed < step
    json.dumps(pipe_averaging.judged(row))


@pytest.mark.parametrize(("bucketed", "reached"), [(0.1, True), (0.3, False)])
def test_buckets_may_expose_no_more_than_one_message(bucketed: float, reached: bool):
    exposed = {"flat": 0.2, "bucketed": bucketed, "zero1": 0.1, "alone": 0.0}
    times = {name: {"step": [1.0] * 3, "exposed": [each] * 3} for name, each in exposed.items()}
    row = pipe_averaging.judged({"schedule": "1f1b", "times": times})
    assert (row["ratio"], row["reached"]) == (pytest.approx(bucketed / 0.2), reached)
