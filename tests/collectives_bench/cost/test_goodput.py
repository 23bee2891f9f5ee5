"""Goodput: simulated months of failures, held against closed forms."""

import pytest

from muster.collectives_bench.cost.goodput import (
    KINDS,
    Faults,
    RunTimes,
    best_interval,
    best_spares,
    daly_s,
    replay,
    simulate,
    young_s,
)

DAY_S = 86400.0
TIMES = RunTimes(step_s=1.0, stall_s=1.0, save_s=1.0)


def test_a_run_without_failures_loses_only_the_stalls_of_its_saves() -> None:
    found = simulate(TIMES, Faults(1, 1e15, spares=1), 99.0, runs=3)
    assert found.failures == 0
    assert found.shares["useful"] == pytest.approx(0.99, abs=1e-4)
    assert found.shares["stalls"] == pytest.approx(0.01, abs=1e-4)


def test_the_kinds_add_up_to_the_whole_time_and_failures_to_their_rate() -> None:
    faults = Faults(2000, 100 * DAY_S, spares=3)
    found = simulate(TIMES, faults, 90.0, runs=20)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert set(found.shares) == set(KINDS)
    assert found.failures == pytest.approx(30 * DAY_S / faults.mtbf_s, rel=0.05)
    assert list(found.useful) == sorted(found.useful)
    assert found.at(0.05) <= found.at(0.5) <= found.at(0.95)


def test_half_an_interval_is_lost_by_each_failure() -> None:
    # With failures that are rare compared with saves, a failure loses half an interval, and what was not committed.
    found = simulate(TIMES, Faults(100, 100 * DAY_S, spares=50), 600.0, runs=60)
    lost_s = found.shares["lost_steps"] * 30 * DAY_S / found.failures
    assert lost_s == pytest.approx(300 + TIMES.save_s, rel=0.05)


@pytest.mark.slow
def test_the_best_interval_agrees_with_young_and_daly() -> None:
    faults = Faults(2000, 100 * DAY_S, spares=50)
    best_s, tried = best_interval(TIMES, faults)
    assert young_s(1.0, faults.mtbf_s) == pytest.approx(92.95, rel=1e-3)
    assert daly_s(1.0, faults.mtbf_s) == pytest.approx(young_s(1.0, faults.mtbf_s), rel=0.02)
    assert young_s(1.0, faults.mtbf_s) / 1.5 < best_s < young_s(1.0, faults.mtbf_s) * 1.5
    assert len(tried) > 5


def test_spares_pay_until_repairs_keep_up_with_failures() -> None:
    faults = Faults(2000, 100 * DAY_S, repair_s=3600.0)  # 0.83 nodes are broken at a time
    count, rows = best_spares(TIMES, faults, 90.0, (0, 1, 2, 4, 8, 16))
    shares = [share for _, share in rows]
    assert shares == sorted(shares)
    assert 2 <= count <= 8


def test_a_failure_during_a_restart_begins_another_restart() -> None:
    found = simulate(RunTimes(start_s=1000.0), Faults(1, 1000.0, spares=10**6), 10.0, horizon_s=DAY_S, runs=20)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.shares["useful"] < 0.4


def test_a_run_with_known_failures_loses_the_work_since_its_last_committed_save() -> None:
    times = RunTimes(step_s=1.0, stall_s=0.0, save_s=0.5, detect_s=0.0, stop_s=1.0, start_s=2.0, load_s=0.0)
    found = replay(times, Faults(1, 1.0, spares=9), 10.0, [14.0, 15.0, 50.0], horizon_s=100.0)
    # 14: 4 s lost, restart; 15: cuts the restart short, which lasts until 18; 50: 32 s later, 2 s lost, restart
    assert found.failures == 3
    assert found.shares["lost_steps"] * 100 == pytest.approx(4 + 2)
    assert found.shares["useful"] * 100 == pytest.approx(10 + 30 + 47)
    assert sum(found.shares.values()) == pytest.approx(1.0)
