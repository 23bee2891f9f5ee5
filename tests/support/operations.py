"""Operations played on ranks and judged, for tests on CPUs and on GPUs."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from muster.collectives_bench.catalog import DTYPES, OPERATIONS, actual_bytes
from muster.collectives_bench.ranks.calls import Call
from muster.collectives_bench.ranks.operations import prepare, unsupported
from muster.collectives_bench.records import BenchCell
from muster.jobs.world.world import World

BOTH = ("sync", "async")


def cells(world: World, sizes: list[int], dtypes: Sequence[str], calls: Sequence[str] = BOTH) -> Iterator[BenchCell]:
    """List the cells that the backend has."""
    for name, operation in OPERATIONS.items():
        for place in operation.places:
            for dtype in dtypes:
                for size in sizes:
                    for call in calls:
                        cell = BenchCell(operation=name, dtype=dtype, asked_bytes=size, place=place, call=call)
                        reason = unsupported(cell, dist.get_backend(world.group), world.device)
                        if world.size >= operation.least_ranks and reason is None:
                            yield cell


def prepared(cell: BenchCell, world: World) -> Call:
    """Make a cell's call, its size rounded as a bench job rounds it."""
    nbytes = actual_bytes(OPERATIONS[cell.operation], cell.asked_bytes, world.size, cell.dtype)
    assert world.group is not None
    return prepare(cell, nbytes, world.group, world.device)


def play(world: World, sizes: list[int]) -> int:
    """Fill, call and judge every cell twice; return how many cells there were."""
    every = [*cells(world, sizes, list(DTYPES), ["sync"]), *cells(world, [4000], ["fp32"], ["async"])]
    for cell in every:
        call = prepared(cell, world)
        for _ in range(2):
            call.fill()
            call.run()
            assert call.wrong() == 0, cell
    return len(every)


def has_result(world: World, cell: BenchCell) -> bool:
    """True where this rank gets a result."""
    if cell.operation in ("reduce", "tree_reduce", "gather"):
        return world.rank == 0
    return cell.operation != "barrier" and (cell.operation != "ping_pong" or world.rank < 2)


def result_of(call: Call) -> torch.Tensor:
    """Return where the result lies."""
    result = getattr(call, "output", None)
    return getattr(call, "buffer") if result is None else result  # noqa: B009 - not every call has one
