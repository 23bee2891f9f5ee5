"""The arithmetic of the benchmarks of buckets and steps, without ranks."""

import json

import bucket_size
import ddp_ladder
import pytest

from muster.collectives_bench.cost import profile
from muster.collectives_bench.cost.exposed import Compute
from muster.jobs.runfolder.rundir import RunDir

pytestmark = pytest.mark.command

SINGLES = {str(size): [0.3e-3 + size / 1.3e9] * 4 + [1.0] for size in bucket_size.SIZES}


def test_the_fit_follows_the_medians_whatever_single_outliers_do():
    fit = bucket_size.fitted(SINGLES)
    assert [fit.seconds(size) for size in (3 * 2**20, 64 * 2**20)] == pytest.approx(
        [0.3e-3 + size / 1.3e9 for size in (3 * 2**20, 64 * 2**20)]
    )


def test_regret_is_what_the_chosen_size_costs_beyond_the_measured_best():
    slow = {str(size): [0.060] for size in bucket_size.SIZES} | {str(8 * 2**20): [0.050]}
    found = {"host": 20e-6, "alone": {"sleep 50": 0.050}, "measured": {"sleep 50": slow}}
    row = bucket_size.compare(found, bucket_size.fitted(SINGLES), "sleep 50", "same launch")
    assert (row["chosen"], row["best"]) == (4 * 2**20, 8 * 2**20)
    assert row["regret"] == pytest.approx(0.2)
    assert len(row["predicted_ms"]) == len(bucket_size.SIZES)


def test_exposed_is_what_the_slowest_rank_waits_and_first_steps_do_not_count(tmp_path):
    run = RunDir(tmp_path)
    run.attempt(0).path.mkdir()
    for rank in range(ddp_ladder.NODES):
        rows = [
            {
                "step_s": 1.0,
                "forward_s": 0.1,
                "backward_s": 0.1 + 0.1 * rank,
                "communication_s": 0.9 - 0.1 * rank + step,
            }
            for step in range(4)
        ]
        run.attempt(0).metrics(rank).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = ddp_ladder.measured(run)
    assert found["exposed"] == pytest.approx([2.6, 3.6])
    assert found["rank 0"] == pytest.approx([2.9, 3.9])
    assert found["backward"] == pytest.approx([0.4, 0.4])


def test_the_box_s_modes_are_predicted_from_a_profile_and_lie_above_their_links_alone():
    told = ddp_ladder.predicted(profile.link(1e9), Compute(0.1, 0.1))
    assert set(told) == set(ddp_ladder.MODES)
    times = {"exposed": [1.0], "rank 0": [1.0], "backward": [0.1]}
    rows = [ddp_ladder.row_of("1gbit", 1e9, mode, times, told[mode]) for mode in told]
    assert [row["reached"] for row in rows] == [abs(told[mode] - 1.0) <= 0.1 for mode in told]
    bounds = {row["mode"]: row["bound_s"] for row in rows}
    ring = dict.fromkeys(("allreduce", "flat", "overlap", "bucketed", "ddp"), 0.443)
    assert bounds == pytest.approx({"gather_scatter": 1.772, **ring}, abs=0.001)
    assert all(told[mode] >= bounds[mode] for mode in ("allreduce", "gather_scatter", "flat"))
    assert all(told[mode] < bounds[mode] for mode in ("overlap", "bucketed", "ddp"))  # a part of it is hidden


def test_the_star_takes_as_many_times_as_long_as_there_are_nodes():
    rows = [
        {"rate": rate, "mode": mode, "measured_s": seconds}
        for rate, mode, seconds in (
            ("1gbit", "gather_scatter", 2.0),
            ("1gbit", "allreduce", 0.5),
            ("1gbit", "ddp", 0.4),
            ("100mbit", "allreduce", 5.0),
        )
    ]
    assert ddp_ladder.star_over_ring(rows) == [{"rate": "1gbit", "star": 4.0, "reached": True}]


def test_no_call_of_the_bench_takes_longer_than_its_limit():
    jobs = ddp_ladder.bench_jobs(100e6, 1)
    assert max(jobs["all_reduce"]["bench"]["sizes"]) == 18 * 2**20
    assert max(jobs["gather_scatter"]["bench"]["sizes"]) == 4718592
