"""The quick part of the fault matrix, with real runs: what has to come of each fault, but for the times."""

import random
import shutil
from pathlib import Path

import pytest
from chaos import strike
from faults.bench import Bench
from faults.damage import flip
from faults.kills import torment
from faults.live import Live
from faults.matrix import FAULTS
from faults.table import Fault

from muster.jobs.runfolder.checkpointdir import CheckpointDir

pytestmark = [pytest.mark.command, pytest.mark.slow]


@pytest.mark.ranks
@pytest.mark.cluster
@pytest.mark.soak  # tests in tests/launch/ cause the same: hangs, lost nodes, kills of ranks, agents and supervisors
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.key) for fault in FAULTS if fault.quick])
def test_a_hurt_run_ends_as_the_unhurt_one(fault: Fault, bench: Bench) -> None:
    assert strike(fault, bench, timed=False).failures == []


@pytest.mark.ranks
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_place", [False, True])
def test_random_kills_of_everybody_and_a_flipped_bit_leave_the_same_weights(tmp_path: Path, in_place: bool) -> None:
    names: list[str] = []

    def flip_newest(live: Live) -> None:
        *_, before, newest = live.committed()
        for saved in live.run.checkpoints.iterdir():
            if saved.name > newest.name:  # it may be complete, and the next supervisor would commit it
                shutil.rmtree(saved)
        shard = CheckpointDir(newest).shard(0)
        flip(shard, shard, random.Random(3))
        names.append(before.name)

    found, rows = torment(Bench(tmp_path, in_place=in_place), kills=3, seed=3, meanwhile=flip_newest)

    assert sorted(row["kind"] for row in rows) == ["node", "rank", "supervisor"]
    assert (found.code, found.equal) == (0, True)
    assert found.attempts >= 4  # a killed node that returns late begins one more
    assert [row["from"] for row in rows if row["kind"] == "supervisor"] == names
