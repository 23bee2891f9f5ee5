"""Comparisons: how often they are wrong and how often they find something, on noise like a shared machine's; and gates.

The noise: launches of one row spread by 17 % (three of them, slowest less quickest over the middle), one in twenty far
slower, all rows of a launch partly alike, and a drift of +-10 % that lasts about twenty launches.
"""

import itertools
import math
import random
from collections.abc import Sequence
from statistics import NormalDist, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.collectives_bench.records import Result
from muster.collectives_bench.results.rows import BenchRow, rows_of
from muster.jobs.basics.errors import RefusedError
from muster.jobs.measuring import shift
from muster.jobs.measuring.compare import Comparison, RowVerdict, comparison
from muster.jobs.measuring.sides import drift_of, pairs_in_time
from support.bench_records import a_block, a_cell, a_world

SPREAD = 0.095
WORLD = a_world()


def noisy(rng: random.Random, launches: int, rows: int) -> list[list[float]]:
    """Draw the medians of launches, in the order of time: (launches, rows)."""
    drift, found = 0.0, []
    for _ in range(launches):
        drift = 0.95 * drift + rng.gauss(0.0, 0.1 * math.sqrt(1 - 0.95**2))
        shared = drift + rng.gauss(0.0, 0.6 * SPREAD)
        tails = [rng.expovariate(2.5) if rng.random() < 0.05 else 0.0 for _ in range(rows)]
        found.append([100.0 * math.exp(shared + rng.gauss(0.0, 0.8 * SPREAD) + tail) for tail in tails])
    return found


def a_row(
    medians_us: Sequence[float], times: Sequence[float] | None = None, *, size: int = 1024, foreign: float | None = None
) -> BenchRow:
    """Make a row of launches that have these medians."""
    return BenchRow(
        world=WORLD,
        cell=a_cell(asked_bytes=size),
        nbytes=size,
        state="ok",
        launches=len(medians_us),
        p50_us=median(medians_us),
        launch_medians_us=tuple(medians_us),
        launch_times=tuple(times or range(len(medians_us))),
        launch_foreign=(foreign,) * len(medians_us),
    )


def compare(before: Sequence[BenchRow], after: Sequence[BenchRow]) -> list[RowVerdict[BenchRow]]:
    return comparison(before, after).rows


def abba(launches: int) -> tuple[list[int], list[int]]:
    """Return the places in time of A's and of B's launches: A B B A A B ..."""
    turns = [(2 * i, 2 * i + 1) if i % 2 == 0 else (2 * i + 1, 2 * i) for i in range(launches)]
    return [a for a, _ in turns], [b for _, b in turns]


def simulated(
    rng: random.Random, launches: int, rows: int, *, slower: float, interleaved: bool = True
) -> Comparison[BenchRow]:
    """Compare launches of one and the same noise, those of the second result slower by a factor."""
    drawn = noisy(rng, 2 * launches, rows)
    first, second = abba(launches) if interleaved else (list(range(launches)), list(range(launches, 2 * launches)))
    before = [a_row([drawn[i][row] for i in first], first, size=64 << row) for row in range(rows)]
    after = [a_row([drawn[i][row] * slower for i in second], second, size=64 << row) for row in range(rows)]
    return comparison(before, after)


def rate(answer: str, repeats: int, launches: int, rows: int, **how: float) -> float:
    """Return the share of comparisons with an answer."""
    rng = random.Random(f"{launches}/{rows}")
    return sum(simulated(rng, launches, rows, **how).verdict == answer for _ in range(repeats)) / repeats


# How often it is wrong, how often it finds ----------------------------------------------------------------------------


@pytest.mark.parametrize(("launches", "rows"), [(5, 6), (24, 1), (20, 4), (12, 20)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_equals_are_seldom_called_unequal_however_many_rows_they_have(
    launches: int, rows: int, interleaved: bool
) -> None:
    rng, repeats = random.Random(f"{launches}/{rows}/{interleaved}"), 200 if rows < 10 else 80
    answers = [simulated(rng, launches, rows, slower=1.0, interleaved=interleaved).verdict for _ in range(repeats)]
    false = sum(answer in ("worse", "better") for answer in answers) / repeats
    assert false <= 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / repeats)  # of 5 %, one such test in two hundred fails


def test_ten_percent_are_found_by_enough_launches() -> None:
    assert rate("worse", 40, 36, 4, slower=1.10) >= 0.95
    assert rate("better", 40, 36, 4, slower=1 / 1.10) >= 0.95


def test_a_quarter_is_found_always() -> None:
    assert rate("worse", 40, 24, 4, slower=1.25) == 1.0


def test_of_many_rows_the_one_that_is_slower_is_named_and_no_other() -> None:
    rng = random.Random(5)
    drawn = noisy(rng, 60, 12)
    first, second = abba(30)
    before = [a_row([drawn[i][row] for i in first], first, size=64 << row) for row in range(12)]
    after = [
        a_row([drawn[i][row] * (1.4 if row == 7 else 1.0) for i in second], second, size=64 << row) for row in range(12)
    ]
    found = comparison(before, after)
    assert [verdict.row.nbytes for verdict in found.rows if verdict.verdict == "worse"] == [64 << 7]
    assert found.verdict == "worse"


def test_what_is_slower_beyond_doubt_is_found_with_five_launches_and_sixty_rows() -> None:
    rng = random.Random(6)
    rows = [[rng.gauss(100.0, 1.0) for _ in range(10)] for _ in range(60)]
    before = [a_row(values[:5], range(5), size=4 * (1 + i)) for i, values in enumerate(rows)]
    after = [
        a_row([2 * v if i == 3 else v for v in values[5:]], range(5, 10), size=4 * (1 + i))
        for i, values in enumerate(rows)
    ]
    answers = [verdict.verdict for verdict in compare(before, after)]
    assert answers[3] == "worse"
    assert "better" not in answers
    assert answers.count("worse") == 1


def test_same_is_said_only_of_an_interval_within_five_percent() -> None:
    first, second = abba(20)
    steady = [100.0 + (i * 7 % 5) / 10 for i in range(40)]
    found = comparison([a_row([steady[i] for i in first], first)], [a_row([steady[i] for i in second], second)])
    (verdict,) = found.rows
    assert found.verdict == verdict.verdict == "same"
    assert verdict.low is not None
    assert verdict.high is not None
    assert 1 / 1.05 <= verdict.low <= 1.0 <= verdict.high <= 1.05


def test_a_small_difference_beyond_doubt_is_the_same_to_a_user() -> None:
    first, second = abba(20)
    found = compare(
        [a_row([100.0 + i % 3 / 10 for i in first], first)], [a_row([102.0 + i % 3 / 10 for i in second], second)]
    )
    assert [verdict.verdict for verdict in found] == ["same"]


def test_slower_medians_keep_equal_quartiles_from_being_the_same() -> None:
    """Every other call is slow: the quicker quarter does not show it."""
    first, second = abba(12)
    even = [100.0] * 12
    blocks = [
        [a_block(even, launch=i, time=time) for i, time in enumerate(first)],
        [a_block([100.0] * 5 + [150.0] * 7, launch=i, time=time) for i, time in enumerate(second)],
    ]
    before, after = (rows_of(Result(blocks=each)) for each in blocks)
    (verdict,) = compare(before, after)
    assert verdict.verdict == "no verdict"
    assert verdict.why == "the lower quartiles are the same, but the medians differ: 1.50x"


def test_lower_quartiles_are_compared_where_both_have_samples_and_medians_where_not() -> None:
    first, second = abba(12)
    slow = [a_block([200.0] * 12, launch=i, time=time) for i, time in enumerate(second)]
    ticks = [a_block([100.0] * 5 + [400.0] * 7, launch=i, time=time) for i, time in enumerate(first)]
    bare = [block.model_copy(update={"samples_us": []}) for block in ticks]
    (after,) = rows_of(Result(blocks=slow))
    ratios = [compare(rows_of(Result(blocks=before)), [after])[0].ratio for before in (ticks, bare)]
    assert ratios == [pytest.approx(2.0), pytest.approx(0.5)]


def test_without_enough_launches_it_says_how_many_would_do() -> None:
    rng = random.Random(7)
    found = [simulated(rng, 8, 1, slower=1.0).rows[0] for _ in range(20)]
    whys = [verdict.why for verdict in found if verdict.verdict == "no verdict"]
    assert any("launches of each result could detect 10 %" in why for why in whys)


def test_swapping_the_sides_turns_the_answer_round() -> None:
    first, second = abba(12)
    rng = random.Random(8)
    quick = a_row([rng.gauss(100.0, 2.0) for _ in first], first)
    slow = a_row([rng.gauss(130.0, 2.0) for _ in second], second)
    (there,), (back,) = compare([quick], [slow]), compare([slow], [quick])
    assert (there.verdict, back.verdict) == ("worse", "better")
    assert there.ratio == pytest.approx(1 / (back.ratio or 0.0))
    assert there.low == pytest.approx(1 / (back.high or 0.0))


# Interleaved or not ---------------------------------------------------------------------------------------------------


def test_launches_that_take_turns_are_paired_with_their_neighbours() -> None:
    first, second = abba(3)
    assert pairs_in_time(first, second) == [(0, 0), (1, 1), (2, 2)]


def test_results_one_after_the_other_are_not_interleaved() -> None:
    for launches in (3, 5, 20):
        row = a_row([100.0] * launches, range(launches))
        later = a_row([100.0] * launches, range(launches, 2 * launches))
        assert not compare([row], [later])[0].interleaved


def test_a_launch_without_a_partner_is_left_out() -> None:
    first, second = abba(12)
    (verdict,) = compare([a_row([100.0] * 12, first)], [a_row([100.0] * 11, second[:5] + second[6:])])
    assert verdict.interleaved
    assert verdict.launches == (11, 11)


def test_a_drift_of_the_machine_is_no_cause_between_results_of_two_times() -> None:
    rising = [100.0 * 1.01**i for i in range(40)]
    before, after = a_row(rising[:20], range(20)), a_row(rising[20:], range(20, 40))
    assert compare([before], [after])[0].verdict == "no verdict"


def test_drift_is_what_moved_beyond_noise() -> None:
    rng = random.Random(9)
    still = [drift_of([rng.gauss(0.0, 0.1) for _ in range(30)]) for _ in range(200)]
    assert median(still) < 0.02
    assert drift_of([0.01 * i + rng.gauss(0.0, 0.01) for i in range(30)]) == pytest.approx(0.15, abs=0.03)
    assert drift_of([0.0, 1.0, 2.0]) == 0.0


# Gates ----------------------------------------------------------------------------------------------------------------


def test_no_common_row_is_an_error_and_not_the_same() -> None:
    with pytest.raises(RefusedError, match="no row in common"):
        compare([a_row([1.0] * 5, size=64)], [a_row([1.0] * 5, size=128)])
    with pytest.raises(RefusedError, match="no row in common"):
        compare([], [])


def test_rows_of_other_worlds_are_not_compared() -> None:
    other = rows_of(Result(blocks=[a_block(world=a_world(4), launch=launch) for launch in range(5)]))
    with pytest.raises(RefusedError):
        compare([a_row([100.0] * 5, size=2**20)], other)


def test_a_row_that_is_gone_keeps_the_whole_from_being_the_same() -> None:
    steady = [100.0, 100.1, 99.9, 100.0, 100.1, 99.9]
    both = [a_row(steady, size=64), a_row(steady, size=128)]
    found = comparison(both, both[:1])
    assert [verdict.verdict for verdict in found.rows] == ["same"]
    assert (found.verdict, found.only_before) == ("no verdict", 1)
    assert "1 in only one result" in found.line()


@pytest.mark.parametrize(("before", "after"), [(0.01, 0.20), (0.20, 0.01), (0.40, 0.41)])
def test_other_load_on_one_side_or_much_on_both_has_no_verdict(before: float, after: float) -> None:
    rows = a_row([100.0] * 6, range(6), foreign=before), a_row([200.0] * 6, range(6, 12), foreign=after)
    (verdict,) = compare([rows[0]], [rows[1]])
    assert verdict.verdict == "no verdict"
    assert "other programs used" in verdict.why


def test_launches_that_take_turns_share_their_load() -> None:
    first, second = abba(12)
    rows = a_row([100.0] * 12, first, foreign=0.4), a_row([200.0] * 12, second, foreign=0.4)
    assert compare([rows[0]], [rows[1]])[0].verdict == "worse"


def test_two_launches_are_too_few() -> None:
    (verdict,) = compare([a_row([100.0] * 2)], [a_row([200.0] * 2)])
    assert verdict.verdict == "no verdict"
    assert "expected at least 3" in verdict.why


def failing(*, launches: int, failed: int, state: str = "failed") -> BenchRow:
    """Make a row of which some launches failed."""
    good = [a_block(launch=launch) for launch in range(launches)]
    bad = [a_block(None, launch=launches + i, state=state, reason="rank 1 died") for i in range(failed)]
    (row,) = rows_of(Result(blocks=[*good, *bad]))
    return row


@pytest.mark.parametrize(
    ("before", "after", "answer"),
    [
        (failing(launches=5, failed=0), failing(launches=0, failed=5), "worse"),
        (failing(launches=0, failed=5), failing(launches=5, failed=0), "better"),
        (failing(launches=0, failed=5), failing(launches=0, failed=5), "no verdict"),
        (failing(launches=5, failed=0), failing(launches=0, failed=5, state="refused"), "no verdict"),
        (failing(launches=6, failed=0), failing(launches=6, failed=1), "no verdict"),
        (failing(launches=6, failed=0), failing(launches=6, failed=1, state="wrong"), "worse"),
        (failing(launches=6, failed=1, state="wrong"), failing(launches=6, failed=0), "better"),
    ],
)
def test_failures_are_part_of_the_verdict(before: BenchRow, after: BenchRow, answer: str) -> None:
    (verdict,) = compare([before], [after])
    assert verdict.verdict == answer
    if answer != "better":
        assert "rank 1 died" in verdict.why


# The tests themselves -------------------------------------------------------------------------------------------------


def test_signed_ranks_are_those_of_all_signs_counted() -> None:
    differences = [0.3, -0.1, 0.7, 0.2, 0.5, -0.05, 0.4]
    ranks = {value: i + 1 for i, value in enumerate(sorted(differences, key=abs))}
    seen = sum(rank for value, rank in ranks.items() if value < 0)
    as_far = sum(
        sum(rank for rank, sign in zip(ranks.values(), signs, strict=True) if sign) <= seen
        for signs in itertools.product((0, 1), repeat=7)
    )
    assert shift.paired_ranks(differences).p_value() == pytest.approx(2 * as_far / 2**7)


def test_rank_sums_are_those_of_all_divisions_counted() -> None:
    before, after = [1.0, 2.5, 3.0, 7.0], [4.0, 5.0, 6.0]
    everything = [*before, *after]
    seen = sum(y > x for x in before for y in after)
    below = 0
    for chosen in itertools.combinations(range(7), 3):
        rest = [everything[i] for i in range(7) if i not in chosen]
        below += sum(everything[i] > x for i in chosen for x in rest) >= seen
    assert shift.unpaired_ranks(before, after).p_value() == pytest.approx(2 * below / math.comb(7, 3))


@pytest.mark.parametrize(
    ("alpha", "freedom", "quantile"),
    [(0.05, 1, 12.706), (0.05, 2, 4.303), (0.05, 4, 2.776), (0.01, 9, 3.250), (0.001, 8, 5.041), (0.05, 30, 2.042)],
)
def test_students_quantiles_are_those_of_the_tables(alpha: float, freedom: int, quantile: float) -> None:
    assert shift.student_quantile(alpha, freedom) == pytest.approx(quantile, abs=6e-4)


def test_of_many_launches_the_normal_approximation_goes_on_where_the_counting_ends() -> None:
    rng = random.Random(10)
    values = [rng.gauss(0.2, 1.0) for _ in range(shift.EXACT)]
    exact = shift.paired_ranks(values).p_value()
    n, walsh = len(values), [(a + b) / 2 for i, a in enumerate(values) for b in values[i:]]
    outside = min(sum(each < 0 for each in walsh), sum(each > 0 for each in walsh))
    normal = NormalDist(n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24))
    assert exact == pytest.approx(2 * normal.cdf(outside + 0.5), rel=0.03)


numbers = st.lists(st.floats(-1.0, 1.0), min_size=6, max_size=25)


@given(numbers, numbers, st.sampled_from([0.05, 0.01, 0.001]))
def test_an_interval_holds_what_its_test_does_not_reject(x: list[float], y: list[float], alpha: float) -> None:
    for test in (shift.paired_ranks(x), shift.unpaired_ranks(x, y), shift.paired_mean(x), shift.unpaired_mean(x, y)):
        low, high = test.interval(alpha)
        assert low <= test.estimate + 1e-12
        assert test.estimate <= high + 1e-12
        width = min(high - low, 2.0) if high > low else 1.0
        if math.isfinite(low):
            assert test.p_value(low - 0.01 * width - 1e-9) <= alpha * (1 + 1e-6)
            assert test.p_value(high + 0.01 * width + 1e-9) <= alpha * (1 + 1e-6)
