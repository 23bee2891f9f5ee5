"""Tests of the tests: the check used by other tests must detect mistakes in a split model."""

import pytest

from muster.jobs.world.world import World
from support.tensor_mutants import MUTANTS
from support.tensor_parallel import Case, wrong_training

pytestmark = pytest.mark.ranks


def reported(world: World) -> dict[str, bool]:
    """Return for each mutant and way to split sequences whether the check finds something wrong on this rank."""
    found = {}
    for name, (make, _) in MUTANTS.items():
        for sequence in (None, 1):
            with make():
                case = Case(tied=True, norm="layer", sequence=sequence)
                found[f"{name}, {sequence}"] = bool(wrong_training(world, case, steps=1))
    return found


def test_every_mistake_is_reported_on_some_rank_and_nothing_else_is(on_ranks):
    first, second = on_ranks(2, reported)
    found = {each for each in first if first[each] or second[each]}
    assert found == {f"{name}, {sequence}" for name, (_, where) in MUTANTS.items() for sequence in where}
