"""From settings to what is measured: the cells of a world, and their order in each launch. Pure and torch-free."""

import random

from collectives_bench.catalog import OPERATIONS, Operation, Place
from collectives_bench.records import Cell
from collectives_bench.settings import BenchSettings


def cells_of(settings: BenchSettings, ranks: int) -> list[Cell]:
    """List every cell, in the order of a table: operation, type, way of calling, place, size."""
    cells = []
    for name in settings.operations():
        operation = OPERATIONS[name]
        if ranks < operation.least_ranks:
            continue
        for dtype in settings.dtypes if operation.has_size else settings.dtypes[:1]:
            for call in settings.calls:
                for place in places_of(operation, settings.places):
                    for size in settings.sizes if operation.has_size else [0]:
                        cells.append(Cell(operation=name, dtype=dtype, asked_bytes=size, place=place, call=call))
    return cells


def places_of(operation: Operation, wanted: str) -> tuple[Place, ...]:
    """Return the places that an operation is measured in; one that it does not have becomes its default."""
    if wanted == "both":
        return operation.places
    found = tuple(place for place in operation.places if place == wanted)
    return found or operation.places[:1]


def order_of(cells: list[Cell], launch: int, seed: int) -> list[int]:
    """Return the order in which a launch measures the cells: another for every launch, the same on every rank."""
    order = list(range(len(cells)))
    random.Random(f"{seed}/{launch}").shuffle(order)
    return order
