"""The plan of a benchmark: the cells to measure, and their order in each launch.

The functions are pure; the module does not import torch.
"""

import random

from muster.collectives_bench.catalog import OPERATIONS, Operation, Place, actual_bytes
from muster.collectives_bench.records import BenchCell
from muster.collectives_bench.settings import BenchSettings


def cells_of(settings: BenchSettings, ranks: int) -> list[BenchCell]:
    """List all cells in table order: operation, dtype, call mode, place, size."""
    cells = []
    for name in settings.operations():
        operation = OPERATIONS[name]
        if ranks < operation.least_ranks:
            continue
        for dtype in settings.dtypes if operation.has_size else settings.dtypes[:1]:
            for call in settings.calls:
                for place in places_of(operation, settings.places):
                    for size in _sizes(operation, settings.sizes, ranks, dtype):
                        cells.append(BenchCell(operation=name, dtype=dtype, asked_bytes=size, place=place, call=call))
    return cells


def _sizes(operation: Operation, asked: list[int], ranks: int, dtype: str) -> list[int]:
    """Remove sizes that are equal after rounding to whole chunks, so that no size is measured twice."""
    first: dict[int, int] = {}
    for size in asked if operation.has_size else [0]:
        first.setdefault(actual_bytes(operation, size, ranks, dtype), size)
    return list(first.values())


def places_of(operation: Operation, wanted: str) -> tuple[Place, ...]:
    """Return the places of the result ("in", "out") to measure.

    If the operation does not support the requested place, use its default place.
    """
    if wanted == "both":
        return operation.places
    found = tuple(place for place in operation.places if place == wanted)
    return found or operation.places[:1]


def order_of(cells: list[BenchCell], launch: int, seed: int) -> list[int]:
    """Return the order in which a launch measures the cells: different for every launch, the same on every rank."""
    order = list(range(len(cells)))
    random.Random(f"{seed}/{launch}").shuffle(order)
    return order
