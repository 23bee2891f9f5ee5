"""The numbers of a sweep of `bench:` or `timing:` jobs: one row per point and measured cell."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.launch.common import screen

if TYPE_CHECKING:
    from muster.jobs.measuring.launches import MeasuredRow

KINDS: Final = ("bench", "timing")
HEADS: Final = ("point", "measured", "time (us)>", "+- (%)>", "busbw (GB/s)>", "launches>", "state")


def bench_rows(kind: str, groups: Mapping[str, Sequence[Path]]) -> list[dict[str, Any]]:
    """Return the rows of a sweep as JSON. `groups`: the run folders of each point, whose launches are joined.

    Errors as for `jobs.measuring.recorded.Format.read`.
    """
    found = []
    for label, paths in groups.items():
        for row in _measured(kind, paths):
            record = {"point": label, "measured": row.named(in_full=False), **row.labels}
            busbw = getattr(row, "busbw", None)
            numbers = {"time_us": row.p50_us, "spread": row.spread, "busbw": busbw, "launches": row.launches}
            found.append({**record, **numbers, "state": row.state})
    return found


def bench_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table."""
    from muster.collectives_bench.results.table import number

    cells = [
        [
            *(row["point"], row["measured"], number(row["time_us"])),
            *(None if row["spread"] is None else f"{row['spread']:.1f}", number(row["busbw"])),
            *(row["launches"], row["state"]),
        ]
        for row in rows
    ]
    return screen.table(HEADS, cells, spare=("launches>", "+- (%)>"))


def _measured(kind: str, paths: Sequence[Path]) -> "Sequence[MeasuredRow]":
    if kind == "timing":
        from muster.jobs.timing.files import read_timings
        from muster.jobs.timing.rows import joined_rows

        return joined_rows(read_timings(paths))
    from muster.collectives_bench.results.files import read_result
    from muster.collectives_bench.results.rows import rows_of

    return rows_of(read_result(paths))
