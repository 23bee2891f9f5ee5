"""From results to a profile: drawn clusters whose constants are known, and one that was measured."""

import csv
from pathlib import Path

import pytest

from muster.collectives_bench.cost.fit import curves_of, fit, launches_of, series_of
from muster.collectives_bench.cost.heldout import fitted, medians
from muster.collectives_bench.cost.profile import load, save
from muster.collectives_bench.cost.worlds import cores_of, hosts_of
from muster.collectives_bench.records import ForeignLoad, HostFacts, Result
from muster.collectives_bench.results.rows import rows_of
from muster.jobs.basics.errors import RefusedError
from support.bench_records import a_world
from support.costs import OnLinks, OnOneHost, block, drawn, header

pytestmark = pytest.mark.slow

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "scatter", "all_to_all", "barrier")
RECORDED = Path(__file__).parent / "data" / "box-1gbit.csv"
MB = 2**20


def recorded() -> Result:
    """Return what was measured in a box; the first lines of the file say when and where."""
    lines = [each for each in RECORDED.read_text().splitlines() if not each.startswith("#")]
    blocks = [
        block(
            row["operation"],
            int(row["bytes"]),
            a_world(int(row["ranks"]), nodes=int(row["ranks"])),
            float(row["p50_us"]),
            launch=int(row["launch"]),
        )
        for row in csv.DictReader(lines)
    ]
    return Result(headers=[header(a_world(ranks, nodes=ranks)) for ranks in (2, 3, 4)], blocks=blocks)


@pytest.mark.parametrize("truth", [OnOneHost, OnLinks], ids=["one host", "links"])
def test_a_drawn_clusters_held_out_sizes_and_worlds_are_predicted(truth: object) -> None:
    found = fit(drawn(truth, OPERATIONS, noise=0.02))  # type: ignore[arg-type]
    assert found.held_out_sizes is not None
    assert found.held_out_worlds is not None
    assert found.held_out_sizes.mean < 0.03
    assert found.held_out_worlds.mean < 0.06
    assert len(found.curves) == 3 * len(OPERATIONS)


def test_the_cpu_time_of_a_byte_is_that_of_all_machines_in_a_large_all_reduce() -> None:
    blocks = [
        block("all_reduce", nbytes, a_world(4, nodes=4), 1e5, launch=0).model_copy(
            update={"throughput_us": 1e5, "cores": 0.6 if nbytes == MB else 0.1}
        )
        for nbytes in (1024, 16384, MB)
    ]
    found = fit(Result(headers=[header(a_world(4, nodes=4))], blocks=blocks))
    assert found.cpu_s_per_byte == pytest.approx(0.6 * 0.1 / (6 * MB), rel=1e-3)  # 4 ranks send 6 times the buffer


def test_four_ranks_are_predicted_from_two_and_three() -> None:
    known = fit(drawn(OnOneHost, OPERATIONS, worlds=(2, 3), noise=0.02))
    for operation in OPERATIONS[:-1]:
        predicted = known.predict(operation, 10 * MB, ranks=4)
        assert predicted.seconds == pytest.approx(OnOneHost.of(operation, 10 * MB, ranks=4, nodes=1), rel=0.15)


def test_sizes_that_lie_off_every_line_are_met_by_points() -> None:
    bent = drawn(OnOneHost, ("all_reduce",), noise=0.0, bend=lambda nbytes: 1.6 if nbytes > 8 * MB else 1.0)
    known = fit(bent)
    there = OnOneHost.of("all_reduce", 16 * MB, ranks=2, nodes=1)
    assert known.predict("all_reduce", 16 * MB, ranks=2).seconds == pytest.approx(1.6 * there, rel=0.02)


def test_what_a_box_measured_is_predicted_at_held_out_sizes_and_worlds() -> None:
    """The reach is 5 and 10 % on a quiet machine; this recording was made on a busy one."""
    found = fit(recorded())
    assert found.held_out_sizes is not None
    assert found.held_out_worlds is not None
    assert found.held_out_sizes.mean < 0.06
    assert found.held_out_worlds.mean < 0.12
    assert 7e-9 < found.constants[0].beta_s + found.constants[0].rank_s < 9e-9  # a gigabit


def test_intervals_of_a_recorded_box_hold_most_of_what_was_left_out() -> None:
    known = curves_of(series_of(rows_of(recorded())), 0)
    inside = [each.curve.low <= took / guess <= each.curve.high for each in known for guess, took in each.left_out]
    assert sum(inside) / len(inside) >= 0.80


def test_the_same_result_gives_the_same_profile() -> None:
    result = drawn(OnOneHost, OPERATIONS[:2], worlds=(2, 3))
    assert fit(result) == fit(result)


def test_launches_while_others_used_the_cores_are_left_out_where_enough_remain() -> None:
    world = a_world(2)
    blocks = [
        block("all_reduce", MB, world, us, launch=launch).model_copy(
            update={"load": ForeignLoad(foreign=foreign, steal=0.0)}
        )
        for launch, (us, foreign) in enumerate([(100, 0.0), (110, 0.02), (120, 0.05), (900, 0.6), (800, 0.5)])
    ]
    assert sorted(launches_of(rows_of(Result(blocks=blocks))[0])) == pytest.approx([1e-4, 1.1e-4, 1.2e-4])
    assert len(launches_of(rows_of(Result(blocks=blocks[2:]))[0])) == 3


def test_bad_rows_and_lonely_ranks_are_left_out() -> None:
    good = drawn(OnOneHost, ("all_reduce",), worlds=(2,))
    bad = [each.model_copy(update={"state": "failed", "reason": "x", "latency": None}) for each in good.blocks[:3]]
    alone = [block("all_reduce", MB, a_world(1), 5.0)]
    found = series_of(rows_of(Result(blocks=[*good.blocks[3:], *bad, *alone])))
    assert [(each.key.ranks, len(each.samples)) for each in found] == [(2, 6)]


def test_back_to_back_times_get_a_curve_of_their_own() -> None:
    result = drawn(OnOneHost, ("all_reduce",), worlds=(2,))
    blocks = [
        each.model_copy(update={"throughput_us": each.latency.p50_us / 2}) for each in result.blocks if each.latency
    ]
    known = fit(result.model_copy(update={"blocks": blocks}))
    assert [curve.back_to_back for curve in known.curves] == [False, True]
    single, behind = (known.predict("all_reduce", 4 * MB, ranks=2, back_to_back=each).seconds for each in (False, True))
    assert behind == pytest.approx(single / 2, rel=0.05)


def test_pretend_nodes_are_known_by_their_hosts_name_and_share_its_cores() -> None:
    world = a_world(4, nodes=4)
    pretend = header(world).model_copy(
        update={"hosts": [HostFacts(node=node, host="laptop", cores=2, ranks=1) for node in range(4)]}
    )
    assert hosts_of([pretend]) == {world: 1}
    assert hosts_of([header(world)]) == {world: 4}
    assert cores_of([pretend]) == 2
    result = drawn(OnLinks, ("all_reduce", "broadcast"), worlds=(2, 4))
    headers = [
        pretend.model_copy(update={"world": a_world(ranks, nodes=ranks), "hosts": pretend.hosts[:ranks]})
        for ranks in (2, 4)
    ]
    assert [each.one_host for each in fit(result.model_copy(update={"headers": headers})).constants] == [True]


def test_nothing_measured_without_error_is_refused() -> None:
    with pytest.raises(RefusedError, match="every measurement failed"):
        fit(Result())


def test_too_few_sizes_are_refused_with_how_many_are_needed() -> None:
    with pytest.raises(RefusedError, match="an operation needs at least 3 sizes, but at most 2 were measured"):
        fit(drawn(OnOneHost, ("all_reduce",), sizes=(MB, 4 * MB)))


def test_a_barrier_needs_no_sizes() -> None:
    known = fit(drawn(OnOneHost, ("barrier",)))
    assert known.predict("barrier", 0, ranks=3).how == "measured at this size"
    assert known.predict("barrier", 10**9, ranks=3).seconds == known.predict("barrier", 0, ranks=3).seconds


def test_the_profile_says_what_it_was_made_of_and_how_wrong_it_is() -> None:
    known = fit(drawn(OnOneHost, OPERATIONS), name="laptop")
    assert (known.name, known.operations) == ("laptop", [*OPERATIONS])
    assert known.made_of == "synthetic; on node0; 2027-01-15; torch 2.13.0"
    assert all(curve.held_out is not None for curve in known.curves if curve.operation != "barrier")


def test_a_rank_alone_on_its_host_shares_nothing_with_others() -> None:
    [alone] = fit(drawn(OnLinks, OPERATIONS)).constants
    [shared] = fit(drawn(OnOneHost, OPERATIONS)).constants
    assert (alone.overhead_s, alone.host_s, alone.crowding) == (0.0, 0.0, 0.0)
    assert shared.host_s > 0.0


def test_a_fitted_curve_predicts_the_same_after_it_was_drawn_again_from_what_was_measured(tmp_path: Path) -> None:
    result = drawn(OnOneHost, OPERATIONS, noise=0.2)
    known, found = fit(result), series_of(rows_of(result))
    save(known, tmp_path / "p.json")
    read = load(tmp_path / "p.json")
    for before, after, series in zip(known.curves, read.curves, found, strict=True):
        best = fitted(medians(series.samples))
        for size, _ in before.points:
            assert after.seconds(size) == before.seconds(size) == pytest.approx(best.seconds(size), rel=1e-3)
