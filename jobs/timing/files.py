"""Read what runs have timed, and write it for others to read. Nothing that is read is trusted.

A run folder stands for its newest attempt that has a bench.jsonl; its last line may be torn, for the run may still be
writing.
"""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import JobFileError, NotFoundError, RunFolderError
from muster.jobs.basics.files import write_text
from muster.jobs.basics.reading import LARGEST, open_file, parse_json, read_bytes
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.timing.records import VERSION, Dtypes, End, Header, Peak, Timed, Timing, Timings

Record = Header | Peak | Timed | Dtypes | End

RECORDS: Final[dict[str, type[Record]]] = {
    "timing": Header,
    "peak": Peak,
    "timed": Timed,
    "dtypes": Dtypes,
    "end": End,
}
MOST_BYTES: Final = 1 << 26  # every step that was timed stands in it
MARK: Final = b'"muster_timing"'
MARKED_BYTES: Final = 4096  # the mark stands in the beginning of a file of ours


def is_timing(path: Path) -> bool:
    """Say whether a run or a file holds a timing of models; False for what cannot be read."""
    file = _newest(path) if path.is_dir() else path
    try:
        with open_file(file, owned=False) as opened:
            start = opened.read(MARKED_BYTES)
    except OSError:
        return False
    try:
        first = parse_json(start.partition(b"\n")[0])
    except ValueError:
        return MARK in start
    return isinstance(first, dict) and (first.get("record") == "timing" or "muster_timing" in first)


def read_timings(paths: Sequence[Path]) -> Timings:
    """Read runs or files, and return all that they hold as one.

    Raises:
        RunFolderError: there is no such file.
        JobFileError: a file is not a timing, is damaged, or was written by another version.
    """
    return Timings(timings=[timing for path in paths for timing in _read(path)])


def parse(line: bytes) -> Record | None:
    """Read one line; None for one that is no record of ours (of a newer Muster, or torn)."""
    try:
        return RECORDS[parse_json(line)["record"]].model_validate_json(line)
    except (ValueError, KeyError, TypeError):  # pydantic's errors are ValueErrors
        return None


def gather(records: Sequence[Record]) -> Timing | None:
    """Put the records of one run together; None before its header."""
    header = next((each for each in records if isinstance(each, Header)), None)
    if header is None:
        return None
    return Timing(
        header=header,
        peaks=[each for each in records if isinstance(each, Peak)],
        rows=[each for each in records if isinstance(each, Timed)],
        dtypes=[each for each in records if isinstance(each, Dtypes)],
        is_over=any(isinstance(each, End) for each in records),
    )


def write_timings(timings: Timings, path: Path) -> None:
    """Write timings as JSON by rename; errors as `jobs.basics.files.write_text`."""
    write_text(path, timings.model_dump_json(indent=1) + "\n")


def write_csv(timings: Timings, path: Path) -> None:
    """Write all rows as CSV: a line of names, then a line for each row; errors as `jobs.basics.files.write_text`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for timing in timings.timings:
        for row in timing.rows:
            writer.writerow([value(timing, row) for value in COLUMNS.values()])
    write_text(path, text.getvalue())


def _of(name: str) -> Callable[[Timing, Timed], Any]:
    return lambda timing, row: getattr(row, name)


def _summary(name: str) -> Callable[[Timing, Timed], Any]:
    return lambda timing, row: getattr(row.summary, name) if row.summary is not None else None


COLUMNS: Final[dict[str, Callable[[Timing, Timed], Any]]] = {
    "host": lambda timing, row: timing.header.machine.host,
    "device": lambda timing, row: timing.header.machine.gpu or timing.header.machine.cpu,
    "model": _of("model"),
    "pass": _of("pass_name"),
    "precision": _of("precision"),
    "compile": lambda timing, row: timing.header.settings.compile,
    "activation_checkpointing": lambda timing, row: timing.header.settings.activation_checkpointing,
    "state": _of("state"),
    "parameters": _of("parameters"),
    "batch": _of("batch"),
    "context": _of("context"),
    "steps": _summary("n"),
    "first_s": _of("first_s"),
    "mean_s": _summary("mean_s"),
    "std_s": _summary("std_s"),
    "min_s": _summary("min_s"),
    "rate": _of("rate"),
    "unit": lambda timing, row: f"{row.unit}/s",
    "flops": _of("flops"),
    "flops_per_s": _of("flops_per_s"),
    "matmul_share": _of("matmul_share"),
    "peak_bytes": _of("peak_bytes"),
    "warm_up_s": lambda timing, row: " ".join(f"{each:g}" for each in row.warm_up_s),
    "steps_s": lambda timing, row: " ".join(f"{each:g}" for each in row.steps_s),
    "reason": _of("reason"),
}


def _newest(folder: Path) -> Path:
    run = RunDir(folder)
    for number in reversed(run.attempt_numbers()):
        if (file := run.attempt(number).bench).is_file():
            return file
    return folder / "bench.jsonl"


def _read(path: Path) -> list[Timing]:
    file = _newest(path) if path.is_dir() else path
    try:
        data = read_bytes(file, MOST_BYTES, owned=False)
    except OSError as error:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else RunFolderError
        raise kind(f"{file}: {error.strerror}; name a run of muster bench model, or a file that it wrote") from error
    except ValueError as error:
        raise JobFileError(f"{error}; name a run of muster bench model") from error
    if data.lstrip().startswith(b'{"record"'):
        return [_lines(file, data)]
    try:
        parse_json(data, largest=LARGEST)
        return Timings.model_validate_json(data).timings
    except ValueError as error:
        raise _damaged(file, error) from error


def _lines(file: Path, data: bytes) -> Timing:
    records: list[Record] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            content = parse_json(line, largest=LARGEST)
            kind = RECORDS[content["record"]]
            if kind is Header and content.get("version", VERSION) != VERSION:
                raise JobFileError(
                    f"{file}: written as version {content['version']!r}, this muster reads version {VERSION}; "
                    "use the other"
                )
            records.append(kind.model_validate_json(line))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # no end of line after it: torn
                break
            raise _damaged(file, error, f"line {number}: ") from error
    timing = gather(records)
    if timing is None:
        raise JobFileError(f"{file}: says nothing of what was timed; name a run of muster bench model")
    return timing


def _damaged(file: Path, error: Exception, place: str = "") -> JobFileError:
    what = " ".join(str(error).split())[:120]
    return JobFileError(f"{file}: {place}no timing of ours, or damaged ({what}); name a run of muster bench model")
