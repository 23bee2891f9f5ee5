"""Tests of the tests: the checks used by other tests must detect mistakes in an optimizer."""

import pytest

from muster.jobs.world.world import World
from support.zero_checks import CHECKS
from support.zero_optimizer_mutants import MUTANTS

pytestmark = pytest.mark.ranks


def reports(world: World) -> dict[str, int]:
    """Count what each mutant's check finds wrong on this rank; without a mutant it finds nothing."""
    found = {}
    for name, (mutant, check) in MUTANTS.items():
        with mutant():
            found[name] = len(CHECKS[check](world))
    return {**found, **{f"no mistake, {name}": len(check(world)) for name, check in CHECKS.items()}}


def test_no_mistake_goes_unreported(on_ranks):
    first, second = on_ranks(2, reports)
    silent = {name for name in first if not first[name] and not second[name]}
    assert silent == {f"no mistake, {name}" for name in CHECKS}
