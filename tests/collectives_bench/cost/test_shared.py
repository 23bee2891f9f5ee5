"""The second stage: constants that worlds and operations share, found again from drawn times."""

import pytest

from muster.collectives_bench.cost.constants import Constants
from muster.collectives_bench.cost.formulas import cost
from muster.collectives_bench.cost.shared import LINKS, MeasuredPoint, fit_constants
from support.costs import SIZES, OnLinks, OnOneHost

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "scatter",
    "all_to_all",
    "send_recv",
    "barrier",
)


def points(truth: Constants, worlds: tuple[int, ...] = (2, 3, 4, 8)) -> list[MeasuredPoint]:
    return [
        MeasuredPoint(operation, size, ranks, hosts, truth.of(operation, size, ranks=ranks, nodes=hosts))
        for operation in OPERATIONS
        for ranks in worlds
        for hosts in (ranks if truth.network else 1,)
        for size in (SIZES if operation != "barrier" else (0,))
    ]


@pytest.mark.parametrize("truth", [OnOneHost, OnLinks], ids=["one host", "links"])
def test_constants_are_found_again_well_enough_to_predict_a_world_of_16(truth: Constants) -> None:
    found = truth.model_copy(update=fit_constants(points(truth), backend="gloo", cores=2))
    for operation in OPERATIONS:
        for size in SIZES:
            world = {"ranks": 16, "nodes": 16 if truth.network else 1}
            assert found.of(operation, size, **world) == pytest.approx(truth.of(operation, size, **world), rel=0.05)


def test_a_link_of_a_gigabit_is_found_as_one() -> None:
    found = fit_constants(points(OnLinks), backend="gloo", cores=2)
    assert found["beta_s"] == pytest.approx(8e-9, rel=0.02)


def test_bad_points_do_not_move_the_others() -> None:
    measured = points(OnLinks)
    spoilt = [
        MeasuredPoint(each.operation, each.nbytes, each.ranks, each.hosts, each.seconds * (5 if place % 10 == 0 else 1))
        for place, each in enumerate(measured)
    ]
    assert fit_constants(spoilt, backend="gloo", cores=2)["beta_s"] == pytest.approx(8e-9, rel=0.05)


def test_a_form_without_a_host_has_none() -> None:
    found = fit_constants(points(OnLinks), backend="nccl", cores=8, form=LINKS)
    assert (found["overhead_s"], found["host_s"], found["crowding"]) == (0.0, 0.0, 0.0)


def test_a_time_is_the_larger_of_links_and_host_and_a_crowd_slows_the_host() -> None:
    counts = cost("all_gather", 1e6, ranks=4)
    none = Constants(backend="", device="", dtype="", network=False, cores=2)
    linked = none.model_copy(update={"alpha_s": 1.0})
    hosted = none.model_copy(update={"host_s": 1e-6})
    both = none.model_copy(update={"alpha_s": 1.0, "host_s": 1e-6})
    assert (linked.seconds(counts, 4), hosted.seconds(counts, 4), both.seconds(counts, 4)) == (3.0, 3.0, 3.0)
    assert hosted.model_copy(update={"crowding": 0.5}).seconds(counts, 4) == pytest.approx(4.5)


def test_idle_ranks_do_not_crowd_a_ping_pong() -> None:
    crowded = OnOneHost.model_copy(update={"crowding": 1.0})
    times = [crowded.of("ping_pong", 2**20, ranks=ranks, nodes=1) for ranks in (2, 4, 8)]
    assert len(set(times)) == 1


def test_pretend_nodes_share_one_host() -> None:
    pretend = OnOneHost.model_copy(update={"network": True, "one_host": True})
    here = OnOneHost.of("all_reduce", 2**20, ranks=4, nodes=1)
    assert pretend.of("all_reduce", 2**20, ranks=4, nodes=4) == here


def test_a_rank_that_sends_and_receives_at_once_works_twice_as_long_as_one_that_only_sends() -> None:
    works = Constants(backend="", device="", dtype="", network=False, rank_s=1e-9)
    ring, one_way = (works.of(name, 1e6, ranks=2, nodes=1) for name in ("all_reduce", "broadcast"))
    assert ring == pytest.approx(2 * one_way)
    found = works.model_copy(
        update=fit_constants(points(OnOneHost.model_copy(update={"rank_s": 4e-10})), backend="gloo", cores=2)
    )
    assert found.rank_s == pytest.approx(4e-10, rel=0.3)
