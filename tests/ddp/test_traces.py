"""Starts and numbers of collectives, read from a profiler trace of a step: order only, never durations."""

import pytest

from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS, backwards, traced, wrap, wrong_overlap
from support.data_parallel_models import CASES

pytestmark = pytest.mark.ranks

KIB = 2**-10  # in MB; the chain has four gradients of 16 KiB each

# wrapper, settings, number of gradients still missing at each launch
OVERLAPPED = [
    ("OverlappedDDP", {}, [3, 2, 1, 0]),
    ("BucketedDDP", {"bucket_size_mb": 1 * KIB}, [3, 2, 1, 0]),
    ("BucketedDDP", {"bucket_size_mb": 32 * KIB}, [2, 0]),
    ("BucketedDDP", {"bucket_size_mb": 48 * KIB}, [1, 0]),
    ("BucketedDDP", {"bucket_size_mb": 64 * KIB}, [0]),
    ("BucketedDDP", {"bucket_size_mb": None}, [0]),
    ("BucketedDDP", {}, [0]),
]


@pytest.mark.parametrize(("wrapper", "settings", "left"), OVERLAPPED)
def test_a_bucket_starts_when_its_last_gradient_is_ready(on_ranks, wrapper, settings, left):
    assert on_ranks(2, wrong_overlap, wrapper=wrapper, left=left, **settings) == [[]] * 2


@pytest.mark.parametrize(("wrapper", "count"), [("AllReduce", 4), ("FlatAllReduce", 1), ("GatherScatter", 8)])
def test_what_does_not_overlap_starts_after_the_last_gradient(on_ranks, wrapper, count):
    assert on_ranks(2, wrong_overlap, wrapper=wrapper, left=None, count=count) == [[]] * 2


def launches_within_no_sync(world: World, wrapper: str) -> list[int]:
    model = wrap(world, wrapper, "chain")

    def accumulate() -> None:
        with model.no_sync():
            backwards(world, model, CASES["chain"])

    backwards(world, model, CASES["chain"])
    return [len(traced(accumulate).launches), len(traced(lambda: backwards(world, model, CASES["chain"])).launches)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_only_the_last_micro_batch_communicates(on_ranks, wrapper):
    expected = {"AllReduce": 4, "FlatAllReduce": 1, "GatherScatter": 8, "OverlappedDDP": 4, "BucketedDDP": 1}
    assert on_ranks(2, launches_within_no_sync, wrapper=wrapper) == [[0, expected[wrapper]]] * 2


def launches_of_turned_rank(world: World) -> list[int]:
    """Gradients become ready in another order on rank 1, but the order of launches must not change."""
    model = wrap(world, "OverlappedDDP", "two ways")
    backwards(world, model, CASES["two ways"])
    sizes = {name: each.numel() for name, each in model.named_parameters()}
    return [sizes[name] for (name,) in model.buckets]


def test_buckets_are_launched_in_the_reverse_order_of_registration_on_every_rank(on_ranks):
    assert on_ranks(2, launches_of_turned_rank) == [[3, 12, 9, 36]] * 2
