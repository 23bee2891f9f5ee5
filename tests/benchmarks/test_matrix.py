"""The quick part of the fault matrix, with real runs: what has to come of each fault, but for the times."""

import os

import pytest
from chaos import strike
from faults.bench import Bench
from faults.matrix import FAULTS
from faults.table import Fault
from random_kills import torment

# Two, for every run of the tests (the random kills are most others); some more go with the tests that need patience,
# for what no other test does as a whole. The rest of the quick part is `benchmarks/chaos.py --quick`.
ALWAYS = {"1 rank killed in a collective", "12 one bit flipped"}
PATIENTLY = {
    "2 rank 0 killed",
    "3 rank stopped",
    "8 supervisor killed",
    "10 all ranks killed in saves, 3 times",
    "13 disk full, three saves",
    "14 checkpoint writer stopped 2 s",
    "20 raises at the same step always",
}


def rows() -> list[object]:
    """Return the rows that are tested, each with its marks."""
    return [
        pytest.param(fault, id=fault.key, marks=[] if fault.key in ALWAYS else [pytest.mark.cluster])
        for fault in FAULTS
        if fault.key in ALWAYS | PATIENTLY
    ]


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", rows())
def test_a_hurt_run_ends_as_the_unhurt_one(fault: Fault, bench: Bench) -> None:
    if fault.root and os.geteuid() != 0:
        pytest.skip("mounts; run it as root")
    assert strike(fault, bench, timed=False).failures == []


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_random_kills_of_everybody_leave_the_same_weights(bench: Bench) -> None:
    found = torment(bench.place(), kills=3, seed=3)

    assert found["kills"] == {"rank": 1, "node": 1, "supervisor": 1}
    assert found["attempts"] == 4
    assert found["sha256"] == found["wanted"]
