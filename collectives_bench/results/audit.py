"""The bytes that interfaces sent, compared with the formulas, and the hidden memory of calls, as text."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from muster.collectives_bench.known import LEAST_JUDGED, deviation
from muster.collectives_bench.records import Wire, World
from muster.collectives_bench.sizes import size_text
from muster.jobs.measuring.columns import Column, cells, headings

if TYPE_CHECKING:
    from muster.collectives_bench.results.rows import Row


def _over_size(value: "Callable[[Row], float | None]") -> "Callable[[Row], str]":
    return lambda row: "-" if (found := value(row)) is None else f"{found / row.nbytes:.2f}"


LABELS: Final[tuple[Column, ...]] = (
    ("operation", "", 25, lambda row: row.cell.operation),
    ("size", "", 10, lambda row: size_text(row.nbytes)),
    ("place", "", 10, lambda row: row.cell.way),
)
SENT: Final[tuple[Column, ...]] = (
    *LABELS,
    ("sent / S", "measured", 12, _over_size(lambda row: row.wire.sent_bytes if row.wire else None)),
    ("known / S", "of this", 12, _over_size(lambda row: row.wire.known_bytes if row.wire else None)),
    ("best / S", "possible", 12, _over_size(lambda row: row.wire.best_bytes if row.wire else None)),
    ("off", "(%)", 9, lambda row: _off(row.wire)),
)
HELD: Final[tuple[Column, ...]] = (
    *LABELS,
    ("buffers", "(S)", 12, _over_size(lambda row: row.buffers_bytes)),
    ("hidden", "(S)", 12, _over_size(lambda row: row.hidden_bytes)),
)


def lines(rows: "Sequence[Row]") -> list[str]:
    """Return one line for each row whose bytes were counted, under a heading for each world.

    `known` is the bytes of this library's algorithm, `best` those of the best one; `off` compares sent with known.
    """
    found = []
    counted = [(row, row.wire) for row in rows if row.wire is not None and row.nbytes]
    for world, group in groupby(counted, key=lambda each: each[0].world):
        of_world = list(group)
        interfaces = sorted({name for _, wire in of_world for name in wire.interfaces})
        found += ["#", f"# bytes that all ranks together sent ({', '.join(interfaces)}), over S · {world.text}"]
        found += headings(SENT, "")
        found += [f"{cells(SENT, row)}  {_verdict(row.cell.operation, wire)}" for row, wire in of_world]
    return found


def memory(rows: "Sequence[Row]") -> list[str]:
    """Return the memory of calls beside our buffers, for each operation at its largest size; nothing if unknown."""
    largest: dict[tuple[World, str, str, str], Row] = {}
    for row in rows:
        if row.hidden_bytes is not None and row.nbytes:
            largest[row.world, row.cell.operation, row.cell.dtype, row.cell.way] = row  # rows are in order of size
    if not largest:
        return []
    head = ["#", "# memory of a rank, the largest, over S", *headings(HELD, "")]
    return [*head, *(cells(HELD, row) for row in largest.values())]


def _off(wire: Wire) -> str:
    return f"{round((wire.sent_bytes / wire.known_bytes - 1) * 100, 1) + 0.0:+.1f}" if wire.known_bytes else "-"


def _verdict(operation: str, wire: Wire) -> str:
    """Name the deviation, with its reason where one is known."""
    if wire.best_bytes < LEAST_JUDGED:
        return f"not judged below {size_text(LEAST_JUDGED)}: headers count"
    return deviation(operation, wire) or "as the formula"
