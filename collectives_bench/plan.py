"""From settings to measurements: the cells for a number of ranks, and their order in each launch. Pure, torch-free."""

import random

from muster.collectives_bench.catalog import OPERATIONS, Operation, Place, actual_bytes
from muster.collectives_bench.records import Cell
from muster.collectives_bench.settings import BenchSettings


def cells_of(settings: BenchSettings, ranks: int) -> list[Cell]:
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
                        cells.append(Cell(operation=name, dtype=dtype, asked_bytes=size, place=place, call=call))
    return cells


def _sizes(operation: Operation, asked: list[int], ranks: int, dtype: str) -> list[int]:
    """Remove sizes that become equal after rounding to whole chunks, which would be measured twice."""
    first: dict[int, int] = {}
    for size in asked if operation.has_size else [0]:
        first.setdefault(actual_bytes(operation, size, ranks, dtype), size)
    return list(first.values())


def places_of(operation: Operation, wanted: str) -> tuple[Place, ...]:
    """Return the places to measure an operation in; a place that it lacks is replaced by its default."""
    if wanted == "both":
        return operation.places
    found = tuple(place for place in operation.places if place == wanted)
    return found or operation.places[:1]


def order_of(cells: list[Cell], launch: int, seed: int) -> list[int]:
    """Return the order in which a launch measures the cells: different for every launch, the same on every rank."""
    order = list(range(len(cells)))
    random.Random(f"{seed}/{launch}").shuffle(order)
    return order
