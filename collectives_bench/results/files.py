"""Read what runs have measured, and write it for others to read. Nothing that is read is trusted.

a run folder    its newest attempt that has a bench.jsonl
bench.jsonl     a record a line; the last may be torn, for the run may still be writing, or have died at it
result.json     {"muster_bench": 1, "headers": [...], "blocks": [...], "pairs": [...]}, a record a line as well
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from muster.collectives_bench.catalog import DTYPES, OPERATIONS
from muster.collectives_bench.records import VERSION, Block, Cell, End, Header, Pair, Result, Timing, World
from muster.collectives_bench.results.rows import Row
from muster.jobs.basics.errors import JobFileError, NotFoundError, RunFolderError
from muster.jobs.basics.files import write_text
from muster.jobs.basics.reading import LARGEST, parse_json, read_bytes
from muster.jobs.basics.words import unknown
from muster.jobs.runfolder.rundir import RunDir

Model = TypeVar("Model", bound=BaseModel)

RECORDS: Final[dict[str, type[Header] | type[Block] | type[Pair] | type[End]]] = {
    "header": Header,
    "block": Block,
    "pair": Pair,
    "end": End,
}
MOST_BYTES: Final = 1 << 31  # every sample of every block stands in it; a larger file is none of ours
MOST_RANKS: Final = 100_000
MOST_SAMPLES: Final = 10**9  # of one launch


def read_result(paths: Sequence[Path]) -> Result:
    """Read runs or files and return all that they hold as one; what two of them hold is taken once.

    Raises:
        RunFolderError: there is no such file, or nothing measured in the folder.
        JobFileError: a file is not a result, is damaged, or was written by another version.
    """
    found = [_read(path) for path in paths]
    return Result(
        headers=_once([header for result in found for header in result.headers]),
        blocks=_once([block for result in found for block in result.blocks]),
        pairs=_once([pair for result in found for pair in result.pairs]),
    )


def write_result(result: Result, path: Path) -> None:
    """Write a result as JSON, a record a line, by rename.

    Raises:
        RunFolderError, StorageError: it cannot be written.
    """
    parts = []
    for name, records in (("headers", result.headers), ("blocks", result.blocks), ("pairs", result.pairs)):
        lines = ",\n".join(f"  {record.model_dump_json()}" for record in records)
        parts.append(f' "{name}": [\n{lines}\n ]' if lines else f' "{name}": []')
    _write(path, f'{{"muster_bench": {VERSION},\n' + ",\n".join(parts) + "\n}\n")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write rows as CSV: a line of names, then a line for each row; what was not measured is empty.

    Raises:
        RunFolderError, StorageError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([value(row) for value in COLUMNS.values()])
    _write(path, text.getvalue())


def _of(name: str) -> Callable[[Row], Any]:
    return lambda row: getattr(row, name)


COLUMNS: Final[dict[str, Callable[[Row], Any]]] = {
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


def _write(path: Path, text: str) -> None:
    if not path.parent.is_dir():
        raise RunFolderError(f"{path}: there is no folder {path.parent}; make it, or name another file")
    write_text(path, text)


def _read(path: Path) -> Result:
    file = _newest(path) if path.is_dir() else path
    try:
        data = read_bytes(file, MOST_BYTES, owned=False)
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else RunFolderError
        raise kind(f"{file}: {error.strerror}; name a run, its bench.jsonl, or a result file") from error
    except ValueError as error:
        raise JobFileError(f"{error}; name a result of muster bench") from error
    result = _lines(file, data) if _is_lines(data) else _whole(file, data)
    if not (result.headers or result.blocks or result.pairs):
        raise JobFileError(f"{file}: holds no records; name a result of muster bench")
    for place, record in _all(result):
        if complaint := _complaint(record):
            raise JobFileError(f"{file}: {place}: {complaint}; measure anew, or leave the file out")
    return result


def _newest(folder: Path) -> Path:
    run = RunDir(folder)
    for number in reversed(run.attempt_numbers()):
        if (file := run.attempt(number).bench).is_file():
            return file
    if (file := folder / "bench.jsonl").is_file():  # an attempt's own folder
        return file
    why = run.command("why")
    raise NotFoundError(f"{folder}: nothing was measured here (no attempt has a bench.jsonl); {why} says more")


def _is_lines(data: bytes) -> bool:
    """Say whether the first line is a record by itself; of a whole result it is the begin of one, or has its mark."""
    try:
        first = parse_json(data.lstrip().partition(b"\n")[0])
    except ValueError:
        return False
    return isinstance(first, dict) and "muster_bench" not in first


def _whole(file: Path, data: bytes) -> Result:
    content = _json(file, data, "")
    if not isinstance(content, dict) or "muster_bench" not in content:
        raise JobFileError(f"{file}: not a result of muster bench (no muster_bench in it); name a result file or a run")
    _check_version(file, content["muster_bench"])
    return _valid(file, Result, data, "")


def _lines(file: Path, data: bytes) -> Result:
    headers: list[Header] = []
    blocks: list[Block] = []
    pairs: list[Pair] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _record(file, line, number)
        except JobFileError:
            if number == len(lines):  # no end of line after it: torn
                break
            raise
        if isinstance(record, Header):
            headers.append(record)
        elif isinstance(record, Block):
            blocks.append(record)
        elif isinstance(record, Pair):
            pairs.append(record)
    return Result(headers=headers, blocks=blocks, pairs=pairs)


def _record(file: Path, line: bytes, number: int) -> Header | Block | Pair | End:
    content = _json(file, line, f"line {number}: ")
    name = content.get("record") if isinstance(content, dict) else None
    if not isinstance(name, str) or name not in RECORDS:
        raise JobFileError(f"{file}: line {number}: not a record of muster bench; name a result of muster bench")
    if name == "header":
        _check_version(file, content.get("version", VERSION))
    return _valid(file, RECORDS[name], line, f"line {number}: ")


def _json(file: Path, data: bytes, place: str) -> Any:
    try:
        return parse_json(data, most=MOST_BYTES, largest=LARGEST)
    except ValueError as error:
        raise JobFileError(f"{file}: {place}not JSON ({error}); the file is damaged, or no result of ours") from error


def _check_version(file: Path, version: Any) -> None:
    if version != VERSION:
        raise JobFileError(
            f"{file}: written as version {version!r}, this muster reads version {VERSION}; use the other"
        )


def _valid(file: Path, model: type[Model], data: bytes, place: str) -> Model:
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise JobFileError(
            f"{file}: {place}{where}: {first['msg'].lower()}, got {first['input']!r:.60}{more}; the file is damaged"
        ) from error


def _all(result: Result) -> Iterator[tuple[str, Header | Block | Pair]]:
    yield from ((f"headers.{number}", header) for number, header in enumerate(result.headers))
    yield from ((f"blocks.{number}", block) for number, block in enumerate(result.blocks))
    yield from ((f"pairs.{number}", pair) for number, pair in enumerate(result.pairs))


def _complaint(record: Header | Block | Pair) -> str | None:
    """Say what no type can: names and numbers that would make nonsense of a table."""
    if complaint := _of_world(record.world):
        return complaint
    if isinstance(record, Pair):
        return next(filter(None, map(_of_timing, (record.latency, record.there, record.back))), None)
    if isinstance(record, Block):
        return _of_cell(record.cell) or _of_timing(record.latency) or _of_numbers(record)
    return None


def _of_world(world: World) -> str | None:
    sizes = (world.nodes, world.ranks_per_node, world.ranks)
    if min(sizes) < 1 or max(sizes) > MOST_RANKS:
        return f"a world of {world.ranks} ranks on {world.nodes} nodes"
    return None


def _of_cell(cell: Cell) -> str | None:
    if cell.operation not in OPERATIONS:
        return unknown("operation", cell.operation, tuple(OPERATIONS))
    return None if cell.dtype in DTYPES else unknown("dtype", cell.dtype, tuple(DTYPES))


def _of_timing(timing: Timing | None) -> str | None:
    if timing is not None and (
        not 1 <= timing.n <= MOST_SAMPLES or timing.min_us < 0 or not timing.min_us <= timing.p50_us <= timing.max_us
    ):
        return f"times that cannot be: n {timing.n}, min {timing.min_us}, p50 {timing.p50_us}, max {timing.max_us}"
    return None


def _of_numbers(block: Block) -> str | None:
    if block.nbytes < 0 or min(block.samples_us, default=0.0) < 0:
        return "a size or a time below 0"
    return None


def _once(records: list[Model]) -> list[Model]:
    seen: set[str] = set()
    kept = []
    for record in records:
        if (text := record.model_dump_json()) not in seen:
            seen.add(text)
            kept.append(record)
    return kept
