"""Every wrapper on every kind of module, on 1 to 4 ranks, compared with one process."""

import pytest

from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS, wrong_gradients, wrong_start
from support.data_parallel_models import CASES
from support.soak import only_some

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MODULES = [case for case in CASES if case not in ("vgg11", "gpt")]  # these are trained in test_training.py
EVERY_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)


def all_starts(world: World) -> list[str]:
    problems = {(wrapper, case): wrong_start(world, wrapper, case) for wrapper in WRAPPERS for case in CASES}
    return [f"{what}: {each}" for what, found in problems.items() for each in found]


def test_every_rank_starts_with_parameters_and_buffers_of_rank_0(on_ranks):
    assert on_ranks(3, all_starts) == [[]] * 3


def all_gradients(world: World, wrapper: str, shards: int) -> list[str]:
    """Use `shards` per rank with exact sums, and one otherwise."""
    near = {case: wrong_gradients(world, wrapper, case) for case in MODULES}
    exact = {f"{case}, exact": wrong_gradients(world, wrapper, case, shards, exact=True) for case in MODULES}
    return [f"{case}: {each}" for case, found in {**near, **exact}.items() for each in found]


# One to three ranks compute the same six shards, and must get the same bits.
@EVERY_WRAPPER
@pytest.mark.parametrize(("world_size", "shards"), only_some([(1, 6), (2, 3), (3, 2), (4, 1)], [(2, 3), (4, 1)]))
def test_gradients_become_the_mean_over_ranks_whatever_the_module(on_ranks, wrapper, world_size, shards):
    assert on_ranks(world_size, all_gradients, wrapper=wrapper, shards=shards) == [[]] * world_size
