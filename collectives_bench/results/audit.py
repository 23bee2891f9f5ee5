"""Tables of the bytes that interfaces sent, compared with the formulas, and of the hidden memory of calls."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from muster.collectives_bench.known import LEAST_JUDGED, deviation
from muster.collectives_bench.records import WireBytes, WorldRecord
from muster.collectives_bench.sizes import size_text
from muster.jobs.measuring.columns import Column, cells, headings

if TYPE_CHECKING:
    from muster.collectives_bench.results.rows import BenchRow


def _over_size(value: "Callable[[BenchRow], float | None]") -> "Callable[[BenchRow], str]":
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


def lines(rows: "Sequence[BenchRow]") -> list[str]:
    """Return one line for each row with counted bytes, under a heading for each world.

    `known` is the number of bytes of this library's algorithm, `best` that of the best algorithm. `off` compares the
    sent bytes with `known`.
    """
    found = []
    counted = [(row, row.wire) for row in rows if row.wire is not None and row.nbytes]
    for world, group in groupby(counted, key=lambda each: each[0].world):
        of_world = list(group)
        interfaces = sorted({name for _, wire in of_world for name in wire.interfaces})
        found += ["#", f"# bytes that all ranks together sent ({', '.join(interfaces)}), divided by S · {world.text}"]
        found += headings(SENT, "")
        found += [f"{cells(SENT, row)}  {_verdict(row.cell.operation, wire)}" for row, wire in of_world]
    return found


def memory(rows: "Sequence[BenchRow]") -> list[str]:
    """Format the known memory of calls beyond Muster's buffers: one number per operation, at its largest size."""
    largest: dict[tuple[WorldRecord, str, str, str], BenchRow] = {}
    for row in rows:
        if row.hidden_bytes is not None and row.nbytes:
            largest[row.world, row.cell.operation, row.cell.dtype, row.cell.way] = row  # rows are sorted by size
    if not largest:
        return []
    head = ["#", "# largest memory of a rank, divided by S", *headings(HELD, "")]
    return [*head, *(cells(HELD, row) for row in largest.values())]


def _off(wire: WireBytes) -> str:
    return f"{round((wire.sent_bytes / wire.known_bytes - 1) * 100, 1) + 0.0:+.1f}" if wire.known_bytes else "-"


def _verdict(operation: str, wire: WireBytes) -> str:
    """Describe the deviation, and its reason if that is known."""
    if wire.best_bytes < LEAST_JUDGED:
        return f"not compared below {size_text(LEAST_JUDGED)}, where headers matter"
    return deviation(operation, wire) or "as the formula"
