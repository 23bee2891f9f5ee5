"""Tests of the tests: the checks used by other tests must detect mistakes in a wrapper."""

import pytest

from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS, wrong_gradients, wrong_overlap, wrong_start, wrong_training
from support.data_parallel_mutants import MUTANTS

pytestmark = pytest.mark.ranks

CHECKS = {"start": wrong_start, "gradients": wrong_gradients, "overlap": wrong_overlap, "training": wrong_training}
SMALL = {"bucket_size_mb": 32 / 1024}  # gives two buckets for the chain
ONE_BY_ONE = ("OverlappedDDP", {"left": [3, 2, 1, 0]})
TWO_BY_TWO = ("BucketedDDP", {"left": [2, 0], **SMALL})

# mutant, check that must detect it, wrapper, arguments of the check
MISTAKES = [
    *(("no broadcast", check, wrapper, {"case": "toy"}) for wrapper in WRAPPERS for check in ("start", "gradients")),
    *(("buffers forgotten", "start", wrapper, {"case": "odd"}) for wrapper in WRAPPERS),
    *(("sum for mean", "gradients", wrapper, {"case": "toy"}) for wrapper in WRAPPERS),
    ("sum for mean", "training", "BucketedDDP", {"case": "toy", "optimizer": "sgd"}),
    *(
        (mutant, "overlap", *asked)
        for mutant in ("no overlap", "first hook dropped", "last hook dropped")
        for asked in (ONE_BY_ONE, TWO_BY_TWO)
    ),
    ("too many buckets", "overlap", *TWO_BY_TWO),
]


def unreported(world: World) -> list[str]:
    """Name the mistakes that their check did not detect on this rank."""
    passed = []
    for mutant, check, wrapper, asked in MISTAKES:
        with MUTANTS[mutant]():
            if not CHECKS[check](world, wrapper, **asked):
                passed.append(f"{mutant}, {check}, {wrapper}")
    return passed


def test_no_mistake_goes_unreported(on_ranks):
    first, second = on_ranks(2, unreported)  # rank 1 checks initial values, rank 0 the training
    assert set(first) & set(second) == set()


def test_every_mistake_that_there_is_a_mutant_of_is_tried():
    assert {mutant for mutant, *_ in MISTAKES} == set(MUTANTS)
