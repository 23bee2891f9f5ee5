"""Read the records of runs, and write results as JSON or CSV.

result.json     {"muster_bench": 1, "headers": [...], "blocks": [...], "pairs": [...]}, one record on each line
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from muster.collectives_bench.records import VERSION, BenchHeader, Block, Pair, Result
from muster.collectives_bench.results.rows import BenchRow
from muster.jobs.basics.errors import JobFileError
from muster.jobs.measuring.recorded import End, Format, write, write_table

Model = TypeVar("Model", bound=BaseModel)


def gather(records: Sequence[BaseModel]) -> Result:
    """Combine the records of a run into a result."""
    return Result(
        headers=[each for each in records if isinstance(each, BenchHeader)],
        blocks=[each for each in records if isinstance(each, Block)],
        pairs=[each for each in records if isinstance(each, Pair)],
    )


FORMAT: Final[Format[Any, Result]] = Format(
    "muster bench",
    "muster_bench",
    VERSION,
    "header",
    {"header": BenchHeader, "block": Block, "pair": Pair, "end": End},
    Result,
    gather,
)


def read_result(paths: Sequence[Path]) -> Result:
    """Read runs or files and merge them into one result, without duplicate records.

    Raises the errors of `jobs.measuring.recorded.Format.read`.
    """
    found = [FORMAT.read(path) for path in paths]
    if nothing := [path for path, each in zip(paths, found, strict=True) if each == Result()]:
        raise JobFileError(f"{nothing[0]}: contains no records; name a result of muster bench")
    return Result(
        headers=_once([header for result in found for header in result.headers]),
        blocks=_once([block for result in found for block in result.blocks]),
        pairs=_once([pair for result in found for pair in result.pairs]),
    )


def write_result(result: Result, path: Path) -> None:
    """Write a result as JSON, with one record per line, atomically by rename. Raises the errors of `recorded.write`."""
    parts = []
    for name, records in (("headers", result.headers), ("blocks", result.blocks), ("pairs", result.pairs)):
        lines = ",\n".join(f"  {record.model_dump_json()}" for record in records)
        parts.append(f' "{name}": [\n{lines}\n ]' if lines else f' "{name}": []')
    write(path, f'{{"muster_bench": {VERSION},\n' + ",\n".join(parts) + "\n}\n")


def write_csv(rows: Sequence[BenchRow], path: Path) -> None:
    """Write rows as CSV. Cells of values that were not measured are empty. Raises the errors of `recorded.write`."""
    write_table(COLUMNS, ([value(row) for value in COLUMNS.values()] for row in rows), path)


def _once(records: list[Model]) -> list[Model]:
    seen: set[str] = set()
    kept = []
    for record in records:
        if (text := record.model_dump_json()) not in seen:
            seen.add(text)
            kept.append(record)
    return kept


def _of(name: str) -> Callable[[BenchRow], Any]:
    return lambda row: getattr(row, name)


COLUMNS: Final[dict[str, Callable[[BenchRow], Any]]] = {
    "operation": lambda row: row.cell.operation,
    "backend": lambda row: row.world.backend,
    "device": lambda row: row.world.device,
    "nodes": lambda row: row.world.nodes,
    "ranks_per_node": lambda row: row.world.ranks_per_node,
    "ranks": lambda row: row.world.ranks,
    "dtype": lambda row: row.cell.dtype,
    "place": lambda row: row.cell.place,
    "call": lambda row: row.cell.call,
    "asked_bytes": lambda row: row.cell.asked_bytes,
    "nbytes": _of("nbytes"),
    "state": _of("state"),
    "launches": _of("launches"),
    "samples": _of("samples"),
    "p50_us": _of("p50_us"),
    "low_us": _of("low_us"),
    "high_us": _of("high_us"),
    "confidence": _of("confidence"),
    "min_us": _of("min_us"),
    "p95_us": _of("p95_us"),
    "p99_us": _of("p99_us"),
    "max_us": _of("max_us"),
    "cv": _of("cv"),
    "first_us": _of("first_us"),
    "throughput_us": _of("throughput_us"),
    "host_us": _of("host_us"),
    "algbw_gb_s": _of("algbw"),
    "busbw_gb_s": _of("busbw"),
    "wrong": _of("wrong"),
    "late_rank": _of("late_rank"),
    "buffers_bytes": _of("buffers_bytes"),
    "hidden_bytes": _of("hidden_bytes"),
    "wire_bytes": lambda row: row.wire.sent_bytes if row.wire else None,
    "foreign": _of("foreign"),
    "flags": lambda row: "; ".join(row.flags),
    "reason": _of("reason"),
}
