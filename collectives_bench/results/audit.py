"""What calls cost beside time, as text: the bytes that interfaces sent, against the formulas, and hidden memory."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from muster.collectives_bench.known import LEAST_JUDGED, deviation
from muster.collectives_bench.records import Wire, World
from muster.collectives_bench.results.table import way_of, world_text
from muster.collectives_bench.sizes import size_text

if TYPE_CHECKING:
    from muster.collectives_bench.results.rows import Row

WIDTHS: Final = (25, 10, 10, 12, 12, 12, 9)
NAMES: Final = ("operation", "size", "place", "sent / S", "known / S", "best / S", "off")
UNITS: Final = ("", "", "", "measured", "of this", "possible", "(%)")


def lines(rows: "Sequence[Row]") -> list[str]:
    """Return one line for each row whose bytes were counted, under a heading for each world.

    `known` is what this library's algorithm sends, `best` what the best one would; `off` is sent against known.
    """
    found = []
    counted = [row for row in rows if row.wire is not None and row.nbytes]
    for world, group in groupby(counted, key=lambda row: row.world):
        of_world = list(group)
        interfaces = sorted({name for row in of_world if row.wire is not None for name in row.wire.interfaces})
        found += ["#", f"# bytes that all ranks together sent ({', '.join(interfaces)}), over S · {world_text(world)}"]
        found += [_join("#", NAMES), _join("#", UNITS), *map(_line, of_world)]
    return found


def memory(rows: "Sequence[Row]") -> list[str]:
    """Return what calls needed beside our buffers, of each operation at its largest size; nothing where unknown."""
    largest: dict[tuple[World, str, str, str], Row] = {}
    for row in rows:
        if row.hidden_bytes is not None and row.nbytes:
            largest[row.world, row.cell.operation, row.cell.dtype, way_of(row.cell)] = row  # rows come by size
    if not largest:
        return []
    found = ["#", "# memory of a rank, the largest, over S"]
    found += [_join("#", ("operation", "size", "place", "buffers", "hidden"))]
    for row in largest.values():
        shares = ["-" if each is None else f"{each / row.nbytes:.2f}" for each in (row.buffers_bytes, row.hidden_bytes)]
        cells = (row.cell.operation, size_text(row.nbytes), way_of(row.cell), *shares)
        found.append(_join(" ", cells))
    return found


def _line(row: "Row") -> str:
    wire = row.wire
    assert wire is not None
    off = wire.sent_bytes / wire.known_bytes - 1 if wire.known_bytes else None
    values = [f"{each / row.nbytes:.2f}" for each in (wire.sent_bytes, wire.known_bytes, wire.best_bytes)]
    cells = (
        row.cell.operation,
        size_text(row.nbytes),
        way_of(row.cell),
        *values,
        "-" if off is None else f"{round(off * 100, 1) + 0.0:+.1f}",
    )
    return f"{_join(' ', cells)}  {_verdict(row.cell.operation, wire)}"


def _verdict(operation: str, wire: Wire) -> str:
    """Name the deviation, with its reason where one is known."""
    if wire.best_bytes < LEAST_JUDGED:
        return f"not judged below {size_text(LEAST_JUDGED)}: headers count"
    return deviation(operation, wire) or "as the formula"


def _join(start: str, cells: Sequence[str]) -> str:
    text = "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=False))
    return f"{start}{text[1:]}"
