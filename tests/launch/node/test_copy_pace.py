"""The pace of copies: how long sending the bytes of one checkpoint takes."""

import pytest

from muster.launch.node.copy_pace import PATIENCE_S, SLOWEST_BYTES_PER_S, SPREAD, CopyPace

CHUNK = 1 << 18


def sending_s(interval_s: float, shards: int, nbytes: int) -> float:
    """Return how long the second of two checkpoints is sent, if sending itself takes no time."""
    pace = CopyPace()
    for name, at in (("one", 0.0), ("two", interval_s)):
        now = at
        for _ in range(shards):
            pace.shard(name, nbytes // shards, at)
        for sent in range(0, nbytes, CHUNK):
            now += pace.wait_s(min(CHUNK, nbytes - sent), now)
        if name == "one":
            assert now == at  # nothing is known about the time between two copies
    return now - interval_s


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize(("interval_s", "nbytes"), [(65.0, 170 << 20), (2.0, 1 << 30), (0.5, 8 << 20)])
def test_a_copy_is_spread_over_a_part_of_the_time_until_the_next(interval_s: float, nbytes: int, shards: int) -> None:
    assert sending_s(interval_s, shards, nbytes) == pytest.approx(SPREAD * interval_s, rel=0.05)


def test_a_copy_ends_before_its_sender_gives_up() -> None:
    assert sending_s(7200.0, 1, 1 << 30) <= PATIENCE_S + (1 << 30) / SLOWEST_BYTES_PER_S
    assert sending_s(7200.0, 1, 4 * CHUNK) <= 4.0  # a receiver hears something every second
