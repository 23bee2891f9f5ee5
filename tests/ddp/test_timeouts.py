"""The error of a failed collective names its bucket, and the ranks that did not enter it."""

import re
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from muster import ddp
from muster.ddp import timeouts
from muster.ddp.timeouts import Entered, explain
from muster.jobs.world.failures import is_lost_connection
from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS, backwards
from support.data_parallel_models import CASES

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

TIMEOUT_S = 0.5
EXACT_TIMEOUT_S = 4.0


def absent(world: World, wrapper: str, exact: bool) -> list:
    """All run a step; then rank 1 waits until the others have given up, and enters too late."""
    # The test itself communicates in the first group. Its sends and receives keep the timeout of its creation, which
    # is therefore long enough to connect on a busy machine.
    group = dist.new_group(timeout=timedelta(seconds=EXACT_TIMEOUT_S if exact else 30.0))
    model = getattr(ddp, wrapper)(CASES["chain"].build(1), group, exact=exact)
    backwards(world, model, CASES["chain"])
    if not exact:
        _set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)
    said = []
    with mock.patch.object(timeouts, "LATER_S", 0.3):
        if world.rank == 1:
            dist.barrier()
        try:
            backwards(world, model, CASES["chain"])
        except RuntimeError as error:
            said = [type(error).__name__, str(error), is_lost_connection(error)]
        if world.rank != 1:
            dist.barrier()
    dist.barrier()
    return said


@pytest.mark.parametrize(("wrapper", "exact"), [*((wrapper, False) for wrapper in WRAPPERS), ("BucketedDDP", True)])
def test_a_time_out_names_the_bucket_and_who_did_not_come(on_ranks, wrapper, exact):
    first, late, last = on_ranks(3, absent, wrapper=wrapper, exact=exact)
    buckets = {"FlatAllReduce": 1, "BucketedDDP": 1}.get(wrapper, 4)
    for rank, (kind, text, lost) in ((0, first), (2, last)):
        if kind == "CollectiveTimeoutError":
            assert text.startswith(f"rank {rank}: synchronization 2: bucket 1 of {buckets} (")
            # The other rank may be listed, too, if this machine delays it.
            assert re.search(r"it was not entered by ranks? (0-)?1(-2)?: check what", text)
        assert lost  # a reader of the log blames neither of them
    assert "CollectiveTimeoutError" in {first[0], last[0]}
    # The timeout as gloo reports it. Without a report, a rank prints its own measurement, which may differ.
    waited_s = [float(said) for said in re.findall(r"did not end within ([\d.]+) s", first[1] + last[1])]
    timeout_s = EXACT_TIMEOUT_S if exact else TIMEOUT_S
    assert waited_s
    assert all(timeout_s / 2 <= each < 30 for each in waited_s)
    assert late[0] == "CollectiveTimeoutError"
    assert "was entered by all ranks in the end, but rank" in late[1]


ENTERED = Entered(step=3, bucket=1, buckets=5, launched=5, first="head.weight", last="stem.bias", bytes=3 * 2**20)


def told(world: World, text: str) -> list[str]:
    """Ranks fail at different places: 1 is ahead, 2 a step and 3 a bucket behind, 4 reports nothing."""
    places = {0: ENTERED, 1: Entered(3, 2, 5, 3, "a", "b", 1), 2: Entered(2, 1, 5, 5, "a", "b", 1)}
    places[3] = Entered(3, 0, 5, 1, "a", "b", 1)
    said = []
    if world.rank == 0:
        dist.barrier()  # the others have written their reports
    with mock.patch.multiple(timeouts, LATER_S=0.1, LOST_S=0.1, STORE_S=20.0):
        if world.rank in places:
            try:
                explain(RuntimeError(text), places[world.rank], 7.0, world.group)
            except RuntimeError as error:
                said = [type(error).__name__, str(error)]
    if world.rank != 0:
        dist.barrier()
    dist.barrier()
    return said


def test_ranks_that_are_behind_did_not_enter_and_ranks_that_are_ahead_did(on_ranks):
    kind, text = on_ranks(5, told, text="[gloo] Timed out waiting 30000ms for recv operation to complete")[0]
    assert kind == "CollectiveTimeoutError"
    assert text == (
        "rank 0: synchronization 3: bucket 2 of 5 (head.weight ... stem.bias; 3 MB) did not end within 30 s; "
        "it was not entered by ranks 2-4: check what these ranks did instead, or give the group a longer timeout"
    )


def test_a_lost_connection_names_the_bucket_and_who_said_nothing(on_ranks):
    gloo = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:142"
    kind, text = on_ranks(5, told, text=gloo)[0]
    assert kind == "RuntimeError"
    assert text == (
        "rank 0: synchronization 3: bucket 2 of 5 (head.weight ... stem.bias; 3 MB) failed: "
        f"a connection was lost; no report from rank 4: {gloo}"
    )
    assert is_lost_connection(RuntimeError(text))


def lost(world: World, text: str) -> str:
    """Only rank 0 loses its connection, so the others never report."""
    with mock.patch.object(timeouts, "LOST_S", 600.0), timeouts.lost_at_once():
        try:
            if world.rank == 0:
                explain(RuntimeError(text), ENTERED, 7.0, world.group)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_that_continues_in_place_does_not_wait_for_reports_of_the_others(on_ranks):
    gloo = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:142"
    text, *_ = on_ranks(3, lost, text=gloo)
    assert text.endswith(f"failed: a connection was lost; no report from ranks 1-2: {gloo}")


def test_an_error_that_is_no_failed_connection_is_left_as_it_is():
    error = RuntimeError("expected scalar type Float but found Double")
    with pytest.raises(RuntimeError, match="expected scalar type Float") as raised:
        explain(error, ENTERED, 1.0, None)
    assert raised.value is error
