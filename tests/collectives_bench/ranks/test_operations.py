"""Every operation of the catalog on real ranks: what is right is found right, and every kind of wrong is found."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from muster.collectives_bench.catalog import DTYPES, OPERATIONS, actual_bytes
from muster.collectives_bench.ranks.fills import UNWRITTEN
from muster.collectives_bench.ranks.operations import CALLS, unsupported
from muster.collectives_bench.records import BenchCell
from muster.jobs.world.world import World
from support.operations import cells, has_result, play, prepared, result_of

pytestmark = pytest.mark.slow

SIZES = [8, 300_000]  # an element or two a rank; several periods of the pattern
EVERY_WORLD = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def play_all(world: World, sizes: list[int]) -> int:
    return play(world, sizes)


@pytest.mark.ranks
@EVERY_WORLD
def test_every_operation_is_right_in_every_type_place_and_way_of_calling(on_ranks, world_size):
    played = on_ranks(world_size, play_all, sizes=SIZES)
    assert played == [played[0]] * world_size
    assert played[0] > 100


def spoilt(world: World, size: int, dtype: str) -> list[str]:
    """Spoil results on every rank that has one; return what was not noticed."""
    missed = []
    for cell in cells(world, [size], [dtype], ("sync",)):
        call = prepared(cell, world)
        call.fill()
        call.run()
        assert call.wrong() == 0, cell
        if not has_result(world, cell):
            continue
        result = result_of(call)
        for where in (0, result.numel() // 2, result.numel() - 1):
            kept = result[where].clone()
            result[where] += 1
            missed += [f"{cell}: one element at {where}"] * (call.wrong() != 1)
            result[where] = float("nan") if result.is_floating_point() else 0
            missed += [f"{cell}: no number at {where}"] * (call.wrong() != 1)
            result[where] = kept
        half = result.numel() // 2
        swapped = torch.cat([result[half:], result[:half]])
        kept = result.clone()
        result.copy_(swapped)
        missed += [f"{cell}: halves swapped"] * (call.wrong() < half)
        result.copy_(kept)
        result[half:].fill_(-1)
        missed += [f"{cell}: half unwritten"] * (call.wrong() != result.numel() - half)
        result.copy_(kept)
        assert call.wrong() == 0, cell
        call.number += 1  # as if a new fill had not changed the result
        missed += [f"{cell}: of the call before"] * (call.wrong() < result.numel() * 0.9)
    return missed


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_spoilt_missing_misplaced_or_old_element_is_counted_on_every_rank(on_ranks, dtype):
    assert on_ranks(3, spoilt, size=300_000, dtype=dtype) == [[], [], []]


def without_a_call(world: World) -> list[str]:
    """Fill and judge without a call in between; return what looked right."""
    fooled = []
    for cell in cells(world, [40_000], ["fp32", "bf16"], ("sync",)):
        call = prepared(cell, world)
        call.fill()
        if not has_result(world, cell):
            continue
        at_home = cell.operation in ("broadcast", "tree_broadcast") and world.rank == 0  # the root has it already
        if call.wrong() == 0 and not at_home:
            fooled.append(str(cell))
    return fooled


@pytest.mark.ranks
def test_an_operation_that_does_nothing_is_not_right(on_ranks):
    assert on_ranks(2, without_a_call) == [[], []]


def dropped(world: World, dtype: str) -> list[str]:
    """Reduce among three ranks where one has sent nothing, or another's numbers."""
    missed = []
    for name in [name for name, operation in OPERATIONS.items() if operation.reduces]:
        cell = BenchCell(operation=name, dtype=dtype, asked_bytes=40_000, place=OPERATIONS[name].places[0])
        if unsupported(cell, "gloo", "cpu"):
            continue
        call = prepared(cell, world)
        source = call.input if hasattr(call, "input") else call.buffer
        for what in ("nothing", "rank 0 again"):
            call.fill()
            if world.rank == 1:
                if what == "nothing":
                    source.zero_()
                else:
                    call.pattern.write(source, 0, call.number)
            call.run()
            result = result_of(call)
            if has_result(world, cell) and call.wrong() < result.numel() * 0.9:
                missed.append(f"{name}: {what}")
    return missed


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sum_that_lacks_a_rank_or_has_one_twice_is_wrong_everywhere(on_ranks, dtype):
    assert on_ranks(3, dropped, dtype=dtype) == [[], [], []]


def kept_inputs(world: World) -> list[str]:
    missed = []
    for cell in cells(world, [40_000], ["fp32"], ("sync",)):
        call: Any = prepared(cell, world)
        call.fill()
        call.run()
        if cell.place == "out" and call.input.numel():
            call.input[-1] += 1
            missed += [str(cell)] * (call.wrong() != 1)
    return missed


@pytest.mark.ranks
def test_an_input_that_was_written_over_counts_where_it_should_have_been_kept(on_ranks):
    assert on_ranks(2, kept_inputs) == [[], []]


def in_a_sub_group(world: World) -> list[int]:
    group = dist.new_group([1, 3, 2])
    if dist.get_rank(group) >= 0:
        play(World(dist.get_rank(group), 3, group, world.device), [4000])
    dist.barrier(world.group)
    return [dist.get_rank(group)]


@pytest.mark.ranks
def test_ranks_are_those_of_the_group(on_ranks):
    assert on_ranks(4, in_a_sub_group) == [[-1], [0], [1], [2]]


def sizes_of_buffers(world: World) -> dict[str, float]:
    found = {}
    for cell in cells(world, [2**20], ["fp32"], ("sync",)):
        nbytes = actual_bytes(OPERATIONS[cell.operation], cell.asked_bytes, world.size, cell.dtype)
        call = prepared(cell, world)
        if nbytes:
            found[f"{cell.operation} {cell.place}"] = call.buffers_bytes / nbytes
    return found


@pytest.mark.ranks
def test_buffers_are_as_large_as_the_catalog_says(on_ranks):
    for name, share in on_ranks(4, sizes_of_buffers)[0].items():
        operation, place = name.split()
        wanted = 1.0 if place == "in" and operation != "gather_scatter" else OPERATIONS[operation].buffers(4)
        if operation == "exchange_reduce_scatter":  # needs less: what is exchanged is added a segment at a time
            wanted = OPERATIONS["reduce_scatter"].buffers(4)
        assert share == pytest.approx(wanted), name


def test_there_is_a_call_for_every_operation_of_the_catalog_and_no_other():
    assert list(CALLS) == list(OPERATIONS)


@pytest.mark.parametrize(
    ("operation", "place", "call", "dtype", "backend", "device", "words"),
    [
        ("all_reduce", "in", "sync", "fp32", "nccl", "cpu", "nccl supports only GPU tensors"),
        ("send_recv", "out", "sync", "fp32", "gloo", "cuda:1", "gloo's send and recv support only CPU tensors"),
        ("ring_all_reduce", "in", "sync", "fp32", "gloo", "cuda", "gloo's send and recv support only CPU tensors"),
        ("tree_reduce", "in", "async", "fp32", "nccl", "cuda", "has no async_op"),
        ("ping_pong", "out", "async", "fp32", "gloo", "cpu", "has no async_op"),
        ("gather_scatter", "in", "sync", "int32", "gloo", "cpu", "computes a mean"),
        ("all_to_all", "in", "sync", "fp32", "gloo", "cpu", "no variant with its result over its input"),
        ("all_reduce", "in", "async", "int32", "gloo", "cuda", None),
        ("gather_scatter", "in", "sync", "bf16", "gloo", "cuda", None),
        ("ring_all_reduce", "in", "sync", "fp32", "nccl", "cuda", None),
    ],
)
def test_what_cannot_be_measured_is_said_beforehand(operation, place, call, dtype, backend, device, words):
    cell = BenchCell(operation=operation, dtype=dtype, asked_bytes=8, place=place, call=call)
    found = unsupported(cell, backend, torch.device(device))
    assert found is None if words is None else words in str(found)


def filled_twice(world: World) -> list[str]:
    """Fill, call and fill again: the data must be others, and nothing left of the first result."""
    missed = []
    for cell in cells(world, [40_000], ["fp32"], ["sync"]):
        call: Any = prepared(cell, world)
        call.fill()
        source = getattr(call, "input", getattr(call, "buffer", torch.empty(0)))
        before = source.clone()
        call.run()
        call.fill()
        missed += [f"{cell}: old data"] * bool(source.numel() and (source == before).float().mean() > 0.01)
        if cell.place == "out":
            missed += [f"{cell}: old result"] * bool((call.output != UNWRITTEN).any())
    return missed


@pytest.mark.ranks
def test_every_fill_writes_other_data_and_clears_the_result(on_ranks):
    assert on_ranks(2, filled_twice) == [[], []]
