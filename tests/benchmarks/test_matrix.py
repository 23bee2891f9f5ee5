"""The quick part of the fault matrix, with real runs: what has to come of each fault, but for the times."""

import pytest
from chaos import strike
from faults.bench import Bench
from faults.matrix import FAULTS
from faults.table import Fault
from random_kills import torment

# One, for every run of the tests (the random kills are most others), and two that no other test does as a whole.
# The rest of the quick part is a soak.
ALWAYS = {"12 one bit flipped"}
PATIENTLY = {"3 rank stopped", "8 supervisor killed"}


def rows() -> list[object]:
    """Return the rows that are tested, each with its marks."""
    soak = [pytest.mark.cluster, pytest.mark.soak]
    return [
        pytest.param(
            fault,
            id=fault.key,
            marks=[] if fault.key in ALWAYS else [pytest.mark.cluster] if fault.key in PATIENTLY else soak,
        )
        for fault in FAULTS
        if fault.quick
    ]


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", rows())
def test_a_hurt_run_ends_as_the_unhurt_one(fault: Fault, bench: Bench) -> None:
    assert strike(fault, bench, timed=False).failures == []


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_random_kills_of_everybody_leave_the_same_weights(bench: Bench) -> None:
    found = torment(bench.place(), kills=3, seed=3)

    assert found["kills"] == {"rank": 1, "node": 1, "supervisor": 1}
    assert found["attempts"] == 4
    assert found["sha256"] == found["wanted"]
