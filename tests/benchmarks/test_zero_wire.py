"""benchmarks/zero_wire.py at a small scale: steps of layers that compute nothing, and how their links are judged."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import zero_wire

from muster.jobs.world.world import World

pytestmark = [pytest.mark.command, pytest.mark.slow]


def small(world: World) -> dict:
    sides = [zero_wire.ALONE, "zero1", "zero2 exact", "zero3", "ddp"]
    return zero_wire.measure("vgg11", sides, repeats=1, steps=1, tiny=True)


@pytest.mark.ranks
def test_all_sides_move_all_weights_by_the_same_amount(on_ranks):
    sent, other = on_ranks(2, small)
    assert sent == other
    assert sent["apart"] == 0.0
    assert {side for side, found in sent["sides"].items() if found["bare"]} == {"zero1", "zero2 exact", "zero3"}


def test_links_are_held_to_the_rings_volume_in_time_and_bytes():
    sides = {
        "zero1": {"steps": [(9.0, 1.5e6 * 1.1)], "bare": [0.0150 * 1.09]},
        "zero1 exact": {"steps": [(9.0, 1.5e6)], "bare": [0.0150 * 1.14]},
        "zero2": {"steps": [(9.0, 1.5e6 * 1.2)], "bare": [0.0150]},
        "zero3": {"steps": [(9.0, 2.25e6)], "bare": [0.0225 * 1.2]},
        "ddp": {"steps": [(9.0, 9e6)], "bare": []},
    }
    rows = zero_wire.rows_of("vgg11", {"nbytes": 10**6, "apart": 0.0, "sides": sides}, ranks=4, bits_s=8e8)
    assert {row["side"]: row["reached"] for row in rows} == {
        "zero1": True,
        "zero1 exact": True,
        "zero2": False,
        "zero3": False,
        "ddp": True,  # beside
    }
    assert rows[0]["time"] == pytest.approx(1.09)
    assert rows[3]["bytes"] == pytest.approx(1.0)
