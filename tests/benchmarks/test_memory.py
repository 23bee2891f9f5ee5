"""benchmarks/memory.py at a small scale: what a rank measures on real ranks, and how it is judged."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # ranks import this file without its conftest

import memory
import pipe_sides
import torch

from muster.jobs.world.world import World

pytestmark = [pytest.mark.command, pytest.mark.slow]


def small(world: World) -> list:
    peaks = [memory.peak("gpt-5m", side, tiny=True) for side in memory.BOTH]
    held = {kind: memory.in_flight(kind, pipe_sides.TINY, 8) for kind in memory.FAMILIES["ours"]}
    return [peaks, held]


@pytest.mark.ranks
def test_memory_grows_less_than_it_is_in_all_and_1f1b_holds_a_share_of_gpipe(on_ranks):
    (mine, first), (theirs, second) = on_ranks(2, small)
    assert mine == theirs  # the ranks' mean
    assert all(0 <= side["growth"] < side["peak"] for side in mine)
    for stage, held in enumerate((first, second)):
        share = held["1f1b"] / held["gpipe"]
        assert 0.8 * memory.bound(2, stage, 8) < share < 0.6  # what does not grow with micro-batches is large here


def test_memory_counts_storages_while_they_live():
    living = memory.Living()
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


def test_memory_is_held_to_the_bound_on_every_stage():
    held = {"gpipe": [1600, 1600], "1f1b": [220, 111], "torch gpipe": [1600, 1600], "torch 1f1b": [800, 800]}
    rows = memory.pipe_rows(2, 16, held)
    assert [(row["side"], row["stage"], row["reached"]) for row in rows] == [
        ("ours", 0, True),
        ("ours", 1, False),
        ("torch", 0, True),  # beside
        ("torch", 1, True),
    ]
