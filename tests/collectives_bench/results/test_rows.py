"""Rows over launches: whose numbers they show, how sure they are, and what they are flagged for."""

import itertools
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.catalog import OPERATIONS
from muster.collectives_bench.records import BenchMemory, Block, Result, WireBytes
from muster.collectives_bench.results.rows import BenchRow, rows_of
from support.bench_records import a_block, a_cell, a_world


def row_of(*blocks: Block) -> BenchRow:
    """Make the one row of some blocks."""
    (row,) = rows_of(Result(blocks=list(blocks)))
    return row


def launches(*medians_us: float, **more: object) -> list[Block]:
    """Make a launch of alike calls for each median."""
    return [a_block([value] * 7, launch=launch, **more) for launch, value in enumerate(medians_us)]


def test_a_row_is_the_median_of_launch_medians_whatever_the_number_of_calls() -> None:
    row = row_of(a_block([10.0] * 1000), a_block([30.0] * 6, launch=1), a_block([20.0, 20.0, 9000.0], launch=2))
    assert row.p50_us == 20.0
    assert (row.launches, row.tried, row.samples) == (3, 3, 1009)
    assert row.launch_medians_us == (10.0, 30.0, 20.0)


def test_lower_quartiles_are_there_if_all_launches_kept_their_samples() -> None:
    blocks = [a_block([1.0, 2.0, 3.0, 4.0, 5.0]), a_block([10.0, 20.0, 30.0, 40.0, 50.0], launch=1)]
    assert row_of(*blocks).launch_quartiles_us == (2.0, 20.0)
    assert row_of(blocks[0], blocks[1].model_copy(update={"samples_us": []})).launch_quartiles_us == ()


def test_five_launches_have_the_interval_of_the_quickest_and_the_slowest_and_say_94_percent() -> None:
    row = row_of(*launches(12.0, 10.0, 11.0, 14.0, 13.0))
    assert (row.low_us, row.p50_us, row.high_us) == (10.0, 12.0, 14.0)
    assert row.confidence == pytest.approx(0.9375)


def test_one_launch_has_its_own_interval_and_is_flagged() -> None:
    row = row_of(a_block([float(value) for value in range(1, 11)]))
    assert (row.low_us, row.high_us) == (2.0, 9.0)
    assert "one launch" in row.flags


def test_the_interval_over_launches_covers_as_often_as_it_says() -> None:
    rng = random.Random(3)
    hits, repeats = 0, 800
    for _ in range(repeats):
        medians = [rng.lognormvariate(5.0, 0.15) * (2.0 if rng.random() < 0.1 else 1.0) for _ in range(5)]
        row = row_of(*launches(*medians))
        assert row.low_us is not None
        assert row.high_us is not None
        hits += row.low_us <= TRUE_MEDIAN <= row.high_us
    assert hits / repeats == pytest.approx(0.9375, abs=0.035)


def _true_median() -> float:
    rng = random.Random(4)
    drawn = (rng.lognormvariate(5.0, 0.15) * (2.0 if rng.random() < 0.1 else 1.0) for _ in range(40_001))
    return median(list(drawn))


TRUE_MEDIAN = _true_median()


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("broadcast", 4, 1.0), ("reduce_scatter", 2, 0.5)],
)
def test_bandwidths_are_those_of_nccl_tests(operation: str, ranks: int, factor: float) -> None:
    place = OPERATIONS[operation].places[0]
    row = row_of(*launches(1000.0, 1000.0, world=a_world(ranks), cell=a_cell(operation, 10**6, place=place)))
    assert row.algbw == pytest.approx(1.0, rel=1e-4)  # 1e6 bytes in 1e3 us is 1 GB/s
    assert row.busbw == pytest.approx(factor, rel=1e-4)


def test_a_barrier_has_times_and_no_bandwidth() -> None:
    row = row_of(*launches(50.0, 51.0, cell=a_cell("barrier", 0)))
    assert (row.p50_us, row.algbw, row.busbw) == (50.5, None, None)


def test_one_failed_launch_of_five_shows_the_others_numbers_and_the_failure() -> None:
    failed = a_block(None, launch=2, state="failed", reason="rank 1 died: SIGABRT")
    row = row_of(*launches(10.0, 11.0), failed, *[a_block([value] * 7, launch=int(value)) for value in (3.0, 4.0)])
    assert row.state == "failed"
    assert row.reason == "rank 1 died: SIGABRT (1 of 5 launches)"
    assert (row.launches, row.tried) == (4, 5)
    assert row.p50_us == 7.0


def test_a_row_that_always_fails_has_the_first_reason_and_no_numbers() -> None:
    reasons = ["rank 1 died", "skipped: it failed in two launches"]
    row = row_of(*[a_block(None, launch=i, state="failed", reason=reason) for i, reason in enumerate(reasons)])
    assert (row.state, row.reason, row.p50_us, row.is_measured) == ("failed", "rank 1 died", None, False)


def test_wrong_results_outrank_failures_and_their_times_do_not_count() -> None:
    wrong = a_block([1.0] * 7, launch=1, state="wrong", reason="3 wrong elements", wrong=3)
    row = row_of(a_block([10.0] * 7, wrong=0), wrong, a_block(None, launch=2, state="failed", reason="x", wrong=0))
    assert (row.state, row.reason, row.wrong) == ("wrong", "3 wrong elements (1 of 3 launches)", 3)
    assert row.p50_us == 10.0


def test_if_all_results_are_wrong_their_times_are_shown_beside_the_verdict() -> None:
    row = row_of(a_block([10.0] * 7, state="wrong", wrong=5, reason="5 wrong elements"))
    assert (row.state, row.p50_us, row.wrong) == ("wrong", 10.0, 5)


def test_other_programs_during_one_launch_flag_the_row() -> None:
    row = row_of(a_block(foreign=0.01), a_block(launch=1, foreign=0.40), a_block(launch=2, foreign=0.02))
    assert "other programs used up to 40% of the CPUs (1 of 3 launches)" in row.flags
    assert row.foreign == 0.02
    assert row.launch_foreign == (0.01, 0.40, 0.02)


def test_a_quiet_steady_row_has_no_flags() -> None:
    assert row_of(*launches(10.0, 10.5, 9.8, 10.1, 10.0, foreign=0.02, first_us=20.0)).flags == ()


def test_launches_that_disagree_and_slow_first_calls_are_flagged() -> None:
    row = row_of(*launches(10.0, 14.0, 10.0, first_us=100.0))
    assert row.flags == ("launches disagree by 40%", "first call 10x")


def test_a_rank_that_is_the_last_in_every_launch_is_named() -> None:
    row = row_of(*launches(*[10.0] * 5, lateness=[0.8, 1.0]))
    assert row.late_rank == 1
    assert "rank 1 is late" in row.flags


@pytest.mark.parametrize(
    ("operation", "latenesses"),
    [
        ("all_reduce", [[0.8, 1.0]] * 4 + [[1.0, 0.8]]),  # not always the same
        ("all_reduce", [[0.95, 1.0]] * 5),  # not by much
        ("all_reduce", [[0.8, 1.0]] * 3),  # two ranks, three launches: chance
        ("broadcast", [[0.7, 1.0]] * 5),  # its root leaves first by its part
    ],
)
def test_no_rank_is_named_by_chance_or_by_its_part(operation: str, latenesses: list[list[float]]) -> None:
    blocks = [
        a_block(launch=launch, lateness=lateness, cell=a_cell(operation)) for launch, lateness in enumerate(latenesses)
    ]
    assert row_of(*blocks).late_rank is None


def test_memory_and_wire_are_kept() -> None:
    wire = WireBytes(interfaces=["lo"], calls=3, sent_bytes=2.0e6, best_bytes=2.0e6, known_bytes=2.0e6)
    memory = BenchMemory(buffers_bytes=100, hidden_bytes=7)
    row = row_of(
        a_block(memory=memory, wire=wire), a_block(launch=1, memory=BenchMemory(buffers_bytes=100, hidden_bytes=None))
    )
    assert (row.buffers_bytes, row.hidden_bytes, row.wire) == (100, 7, wire)


def test_rows_stand_in_the_order_of_the_catalog_and_of_sizes_however_they_were_measured() -> None:
    cells = [a_cell(name, size) for name in ("all_reduce", "broadcast") for size in (64, 1024, 2**20)]
    shuffled = random.Random(1).sample(cells, len(cells))
    rows = rows_of(Result(blocks=[a_block(cell=cell) for cell in shuffled]))
    assert [row.cell for row in rows] == cells


@given(st.lists(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=20), min_size=1, max_size=8))
def test_every_row_is_in_order(samples: list[list[float]]) -> None:
    row = row_of(*[a_block(each, launch=launch) for launch, each in enumerate(samples)])
    found = [row.min_us, row.low_us, row.p50_us, row.high_us, row.max_us]
    known = [value for value in found if value is not None]
    assert len(known) == len(found)
    assert all(below <= above * (1 + 1e-9) for below, above in itertools.pairwise(known))
    assert 0 <= row.confidence <= 1
