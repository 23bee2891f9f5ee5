"""The benchmark of comparisons: the order of its launches, its slowdown, its judgement, and one real comparison."""

import json
import subprocess
import sys
import time
from pathlib import Path

import a_a_compare
import pytest

from muster.collectives_bench.records import Block
from muster.collectives_bench.results.files import read_result
from muster.jobs.measuring.compare import Comparison, RowVerdict
from support.bench_records import a_block, a_cell

pytestmark = pytest.mark.slow


def test_every_arm_has_its_turn_in_a_random_order_and_then_backwards() -> None:
    arms = [a_a_compare.arm_of(launch, seed=1) for launch in range(40)]
    for first in range(0, 40, 8):
        assert set(arms[first : first + 4]) == set(a_a_compare.ARMS)
        assert arms[first : first + 4] == arms[first + 4 : first + 8][::-1]
    assert len({tuple(arms[first : first + 4]) for first in range(0, 40, 8)}) > 1
    assert arms != [a_a_compare.arm_of(launch, seed=2) for launch in range(40)]


def test_the_slowdown_is_spent_and_not_multiplied() -> None:
    started = time.perf_counter()
    a_a_compare.spinning(lambda: time.sleep(0.02), 1.5)()
    assert time.perf_counter() - started >= 0.03


def launches(factors: dict[str, float]) -> dict[str, list[Block]]:
    """Make twelve launches of each arm, two rows each, as the schedule has them."""
    arms: dict[str, list[Block]] = {arm: [] for arm in a_a_compare.ARMS}
    for launch in range(48):
        arm = a_a_compare.arm_of(launch, seed=0)
        for size in (64, 1024):
            value = 100.0 * factors[arm] * (1 + launch * 7 % 5 / 1000)
            arms[arm].append(a_block([value] * 6, launch=launch, cell=a_cell(asked_bytes=size), foreign=0.01))
    return arms


def test_arms_are_compared_with_the_first_as_neighbours_in_time() -> None:
    found = a_a_compare.compared(launches(a_a_compare.ARMS))
    assert {arm: each.verdict for arm, each in found.items()} == {"A'": "same", "+10": "worse", "+25": "worse"}
    assert all(verdict.interleaved for each in found.values() for verdict in each.rows)


def test_noise_is_that_of_three_launches_in_a_row() -> None:
    blocks = [a_block([value] * 6, launch=launch, foreign=0.1) for launch, value in enumerate((90.0, 100.0, 106.0))]
    assert a_a_compare.noise([blocks]) == {"spread_of_three": pytest.approx(0.16), "foreign": 0.1}


def answered(answer: str) -> Comparison:
    """Make a comparison of one row with this answer."""
    (verdict,) = [RowVerdict(answer, "", ratio=1.0)]  # type: ignore[arg-type]
    return Comparison([verdict], verdict, 0, 0)


@pytest.mark.parametrize(
    ("equals", "tenths", "reached"),
    [
        (["no verdict"] * 38 + ["worse", "better"], ["worse"] * 38 + ["no verdict"] * 2, True),
        (["no verdict"] * 37 + ["worse", "better", "better"], ["worse"] * 40, False),
        (["same"] * 40, ["worse"] * 37 + ["no verdict"] * 3, False),
    ],
)
def test_false_verdicts_and_misses_are_counted(equals: list[str], tenths: list[str], reached: bool) -> None:
    found = [
        {"A'": answered(equal), "+10": answered(tenth), "+25": answered("worse")}
        for equal, tenth in zip(equals, tenths, strict=True)
    ]
    assert all(row["reached"] for row in a_a_compare.rows_from(found, 30)) is reached


@pytest.mark.ranks
def test_one_comparison_is_measured_by_the_real_engine(tmp_path: Path) -> None:
    script = Path(a_a_compare.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--comparisons", "1", "--launches", "3", "--keep", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert [row["name"] for row in record["rows"]] == ["A against A'", "A against +10", "A against +25"]
    assert (record["comparisons"], record["launches"]) == (1, 3), done.stderr
    blocks = read_result([tmp_path / "comparison-000.jsonl"]).blocks
    assert len(blocks) == 3 * len(a_a_compare.ARMS) * 6
    assert {block.state for block in blocks} == {"ok"}
