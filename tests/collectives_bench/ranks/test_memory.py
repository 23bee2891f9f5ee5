"""What calls take beyond their buffers, measured on real ranks against what is expected; and the guard."""

import pytest
import torch
import torch.distributed as dist

from muster.collectives_bench.catalog import OPERATIONS, actual_bytes
from muster.collectives_bench.ranks import memory
from muster.collectives_bench.ranks.operations import prepare
from muster.collectives_bench.ranks.sampling import ControlGroup
from muster.collectives_bench.records import BenchCell
from muster.jobs.machine import free
from muster.jobs.world.world import World

MB = 2**20
GB = 2**30
SIZE = 32 * MB
CPU = torch.device("cpu")


def cell_of(operation: str, size: int = SIZE, place: str | None = None) -> BenchCell:
    return BenchCell(
        operation=operation, dtype="fp32", asked_bytes=size, place=place or OPERATIONS[operation].places[0]
    )


# One of each kind: nothing hidden, segments, a copy on every rank, a copy at the root, columns of our own.
TRIED = ["broadcast", "all_reduce", "all_gather", "reduce_scatter", "gather", "gather_scatter", "ring_reduce_scatter"]


def measured(world: World, operations: list[str]) -> list:
    """Return what this rank allocated, and what a call took beyond it."""
    control = dist.new_group(backend="gloo")
    found = []
    for operation in operations:
        nbytes = actual_bytes(OPERATIONS[operation], SIZE, world.size, "fp32")
        call = prepare(cell_of(operation), nbytes, dist.group.WORLD, CPU)
        call.fill()
        call.run()
        dist.barrier(control)
        found.append((operation, nbytes, call.buffers_bytes, memory.hidden_bytes(call.run, nbytes, CPU)))
    return found


@pytest.mark.ranks
def test_expected_memory_is_within_5_percent_of_what_was_measured(on_ranks):
    for rank, rows in enumerate(on_ranks(2, measured, operations=TRIED)):
        for operation, nbytes, buffers, hidden in rows:
            cell = cell_of(operation)
            expected = memory.expected_hidden(cell, nbytes, 2, root=rank == 0)
            # Two columns are the most that are under way: a rank that its neighbour keeps waiting has one.
            least = expected / 2 if operation == "ring_reduce_scatter" else expected
            told = f"{operation} on rank {rank}: {hidden / MB:.2f} MB, expected {least / MB:.2f} to {expected / MB:.2f}"
            # Copies of S are mapped anew each time; some MB of segments may come from what threads have kept.
            slack = 0.05 * (buffers + hidden) + 3 * MB
            assert least - slack <= hidden <= expected + slack, told
            assert buffers == memory.buffers_bytes(cell, nbytes, 2, root=rank == 0), told


def test_below_the_allocators_threshold_nothing_is_claimed():
    calls = []
    assert memory.hidden_bytes(lambda: calls.append(1), memory.LEAST_MEASURED - 1, CPU) is None
    assert calls == [1]


def test_what_a_call_takes_and_gives_back_is_seen():
    def run() -> None:
        torch.ones(16 * MB)  # 64 MB

    hidden = memory.hidden_bytes(run, 64 * MB, CPU)
    assert hidden is not None
    assert abs(hidden - 64 * MB) < 4 * MB  # the first call of an operation brings code of its own


@pytest.mark.parametrize(
    ("operation", "root", "others"),
    [("all_gather", 1 + 1.25, 1 + 1.25), ("gather", 1 + 1.25, 0.25), ("broadcast", 1, 1), ("gather_scatter", 8, 1)],
)
def test_the_root_of_a_rooted_operation_needs_more_than_the_others(operation, root, others):
    cell = cell_of(operation)
    for is_root, share in ((True, root), (False, others)):
        needed = memory.needed_bytes(cell, GB, 4, root=is_root)
        assert needed == share * GB + memory.RANK_SLACK


def test_nccl_needs_no_more_than_its_buffers():
    assert memory.expected_hidden(cell_of("all_gather"), GB, 4, backend="nccl") == 0


def test_what_fits_is_not_refused(monkeypatch):
    monkeypatch.setattr(free, "free_bytes", lambda: 12 * GB)
    assert memory.refusal(cell_of("all_gather"), GB, ranks=(4, 4), memory_share=0.8) is None


def test_a_refusal_says_what_is_needed_what_is_free_and_what_to_do(monkeypatch):
    monkeypatch.setattr(free, "free_bytes", lambda: 11 * GB)
    assert memory.refusal(cell_of("all_gather"), GB, ranks=(4, 4), memory_share=0.8) == (
        "needs 9.062 GB on this host for its 4 of 4 ranks, but 11 GB are free and memory_share 0.8 allows 8.8 GB; "
        "use smaller sizes, fewer ranks on a node, or a larger memory_share"
    )


def test_only_the_ranks_of_this_host_count(monkeypatch):
    monkeypatch.setattr(free, "free_bytes", lambda: 11 * GB)
    assert memory.refusal(cell_of("all_gather"), GB, ranks=(16, 4), memory_share=0.8) is None


def told(world: World, refusing: list[int]) -> list[str | None]:
    reason = f"rank {world.rank} has not — enough" if world.rank in refusing else None
    return ControlGroup(dist.new_group(backend="gloo"), lambda: None).told(reason)


@pytest.mark.ranks
def test_all_ranks_hear_the_reasons_of_those_that_refuse(on_ranks):
    assert on_ranks(3, told, refusing=[1, 2]) == [[None, *(f"rank {rank} has not — enough" for rank in (1, 2))]] * 3
