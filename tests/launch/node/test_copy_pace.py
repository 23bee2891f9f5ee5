"""The pace of copies: pauses that add up to a part of the time between two copies."""

import pytest

from muster.launch.node.copy_pace import LONGEST_PAUSE_S, LONGEST_S, SPREAD, CopyPace

CHUNK, CHUNKS = 1000, 50


def second_copy_s(interval_s: float) -> float:
    """Return how long the second copy of two equal shards pauses."""
    pace = CopyPace()
    for name, at in (("one", 100.0), ("two", 100.0 + interval_s)):
        for _ in range(2):
            pace.shard(name, CHUNK * CHUNKS, at)
        if name == "one":
            assert pace.pause_s(CHUNK) == 0.0  # nothing is known about the time between two copies
    return sum(pace.pause_s(CHUNK) for _ in range(2 * CHUNKS))


@pytest.mark.parametrize("interval_s", [0.5, 2.0, 65.0])
def test_a_copy_takes_a_part_of_the_time_until_the_next(interval_s: float) -> None:
    assert second_copy_s(interval_s) == pytest.approx(SPREAD * interval_s)


def test_a_copy_ends_before_its_sender_and_its_receiver_give_up() -> None:
    assert second_copy_s(7200.0) == pytest.approx(LONGEST_S)
    pace = CopyPace()
    for name, at in (("one", 0.0), ("two", 7200.0)):
        pace.shard(name, 1, at)
    assert pace.pause_s(CHUNK) == LONGEST_PAUSE_S


def test_the_pace_follows_the_size_and_the_time_of_the_copy_before() -> None:
    pace = CopyPace()
    for name, size, at in (("one", 100, 0.0), ("two", 400, 4.0), ("three", 400, 12.0)):
        pace.shard(name, size, at)
    assert pace.pause_s(100) == pytest.approx(SPREAD * 8.0 / 4)
