"""Assignment of gradients to buckets: properties of the plan, and means that do not depend on it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.ddp.buckets import FIRST_BYTES, MB, GradientSize, plan_buckets
from muster.jobs.world.world import World
from support.data_parallel import wrong_gradients

pytestmark = pytest.mark.slow

KIND = st.sampled_from([("float32", 4), ("float64", 8), ("bfloat16", 2)])
SIZES = st.lists(
    st.builds(lambda n, kind: GradientSize(n, kind[1], kind[0]), st.integers(0, 2_000_000), KIND), max_size=40
)
BOUND = st.none() | st.sampled_from([0.0, 1e-6, 0.5, 1.0, 25.0]) | st.floats(0, 64)


def bytes_of(bucket: tuple[int, ...], sizes: list[GradientSize]) -> int:
    return sum(sizes[place].bytes for place in bucket)


@given(SIZES, BOUND)
def test_every_gradient_lies_in_one_bucket_of_its_kind(sizes, bound):
    buckets = plan_buckets(sizes, bound)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(sizes)))
    assert all(len({sizes[place].kind for place in bucket}) == 1 for bucket in buckets)


@given(SIZES, BOUND)
def test_buckets_are_filled_and_launched_in_the_reverse_order_of_registration(sizes, bound):
    buckets = plan_buckets(sizes, bound)
    assert all(list(bucket) == sorted(bucket, reverse=True) for bucket in buckets)
    lasts = [bucket[-1] for bucket in buckets]  # the gradient that is ready last decides when a bucket can start
    assert lasts == sorted(lasts, reverse=True)


@given(SIZES, st.floats(0, 64))
def test_no_bucket_is_larger_than_asked_unless_one_gradient_is(sizes, bound):
    for bucket in plan_buckets(sizes, bound):
        filling = [place for place in bucket if sizes[place].bytes]
        assert bytes_of(bucket, sizes) <= bound * MB or len(filling) <= 1


@given(SIZES)
def test_none_makes_one_bucket_of_each_kind(sizes):
    assert len(plan_buckets(sizes, None)) == len({size.kind for size in sizes})


@given(st.lists(st.integers(1, 2_000_000), min_size=1, max_size=40), st.floats(0.1, 64))
def test_buckets_are_not_more_than_they_need_be(lengths, bound):
    sizes = [GradientSize(length, 4) for length in lengths]
    buckets = plan_buckets(sizes, bound)
    for this, following in pairwise(buckets[1:]):  # the first bucket is small on purpose
        assert bytes_of(this, sizes) + sizes[following[0]].bytes > bound * MB


@given(st.lists(st.integers(1, 2_000_000), min_size=1, max_size=40), st.floats(0.1, 64))
def test_the_first_bucket_is_small_when_there_are_several(lengths, bound):
    sizes = [GradientSize(length, 4) for length in lengths]
    first, *others = plan_buckets(sizes, bound)
    if others:
        assert bytes_of(first, sizes) <= FIRST_BYTES or len(first) == 1


def test_one_bucket_that_would_hold_everything_is_not_cut_for_a_small_first_one():
    sizes = [GradientSize(2**20, 4)] * 3  # 12 MB
    assert plan_buckets(sizes, 12.0) == plan_buckets(sizes, None) == [(2, 1, 0)]
    assert plan_buckets(sizes, 8.0) == [(2,), (1, 0)]


def test_a_plan_of_two_kinds_is_drawn():
    sizes = [GradientSize(2**18, 4, kind) for kind in "aabaab"]  # 1 MB each
    # b at 5 waits for b at 2, while the a's before it fill their own buckets; the small first bucket is full first
    assert plan_buckets(sizes, 2.0) == [(4,), (5, 2), (3, 1), (0,)]


def all_sizes(world: World) -> list[str]:
    sizes = [0.0, 1e-5, 2e-4, 1e-3, 25.0, None]  # the toy's smallest parameter has 80 bytes, all together 1.4 KB
    return [
        f"{case}, {size} MB: {each}"
        for case in ("toy", "odd", "double", "two ways")
        for size in sizes
        for each in wrong_gradients(world, "BucketedDDP", case, bucket_size_mb=size)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_size_of_buckets_changes_the_mean(on_ranks, world_size):
    assert on_ranks(world_size, all_sizes) == [[]] * world_size
