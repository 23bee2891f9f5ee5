"""benchmarks/compare_equal.py: which runs a comparison draws, what it says of made ones, and one real run."""

import math
import random
from pathlib import Path

import compare_equal
import pytest

from muster.launch.look.steps import PARTS, Measured, MeasuredStep

pytestmark = [pytest.mark.command, pytest.mark.slow]


def a_run(seconds: float, ended: float) -> Measured:
    """A run whose steps all take as long."""
    steps = (MeasuredStep(1, 1, seconds, dict.fromkeys(PARTS, 0.0), 64.0, None, ended),) * 20
    return Measured(f"run-{ended}", "flat", 2, 64, "samples/s", steps, 1, None)


def blocks(noise: float, slower: float = 1.1) -> list[compare_equal.Block]:
    """Sixteen blocks whose runs vary by `noise`, a standard deviation."""
    draw, made, clock = random.Random(0), [], 0
    for _ in range(16):
        block = {}
        for arm in compare_equal.ARMS:
            clock += 1
            seconds = 0.02 * (slower if arm == "+10" else 1.0) * math.exp(draw.gauss(0.0, noise))
            block[arm] = a_run(seconds, float(clock))
        made.append(block)
    return made


def test_a_difference_is_found_on_a_quiet_machine_and_equals_are_not_called_different() -> None:
    rows = {row["name"]: row for row in compare_equal.judged(blocks(0.005), 5)}
    assert list(rows) == ["equal, one sweep", "+10, one sweep", "equal, two sweeps", "+10, two sweeps"]
    assert [rows[name]["share"] for name in rows] == [0.0, 1.0, 0.0, 1.0]
    assert all(row["reached"] for row in rows.values())
    assert sum(rows["equal, one sweep"]["answers"].values()) == compare_equal.DRAWS
    missed = {row["name"]: row["reached"] for row in compare_equal.judged(blocks(0.005, slower=1.0), 5)}
    assert not missed["+10, one sweep"]


def test_two_sweeps_follow_each_other_and_share_no_run() -> None:
    made = blocks(0.0)
    for first, second in compare_equal.two_sweeps(made, 5):
        assert max(block["+10"].steps[0].time for block in first) < min(block["A"].steps[0].time for block in second)


@pytest.mark.ranks
def test_a_block_is_of_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_equal, "ARMS", ["A"])
    compare_equal.measure(tmp_path, "", blocks=1, limit_s=60.0)
    (block,) = compare_equal.blocks_of(tmp_path)
    run = block["A"]
    assert (run.ranks, run.batch, run.skipped + len(run.steps)) == (2, 64, compare_equal.STEPS)
