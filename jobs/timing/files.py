"""Read the timings of runs, and write them as JSON or CSV."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from muster.jobs.basics.errors import NotFoundError
from muster.jobs.basics.files import write_text
from muster.jobs.basics.reading import open_file, parse_json
from muster.jobs.measuring.recorded import End, Format, newest, write_table
from muster.jobs.timing.records import VERSION, Dtypes, Header, Peak, Timed, TimingRecords, Timings
from muster.jobs.timing.rows import ModelRow, rows_of

Record = Header | Peak | Timed | Dtypes | End


def gather(records: Sequence[Record]) -> Timings | None:
    """Combine the records of one run. Return None if there is no header yet."""
    header = next((each for each in records if isinstance(each, Header)), None)
    if header is None:
        return None
    timing = TimingRecords(
        header=header,
        peaks=[each for each in records if isinstance(each, Peak)],
        rows=list(
            {each.case: each for each in records if isinstance(each, Timed)}.values()
        ),  # keep only the newest row of each case
        dtypes=[each for each in records if isinstance(each, Dtypes)],
        is_over=any(isinstance(each, End) for each in records),
    )
    return Timings(timings=[timing])


FORMAT: Final[Format[Any, Timings]] = Format(
    "muster bench model",
    "muster_timing",
    VERSION,
    "timing",
    {"timing": Header, "peak": Peak, "timed": Timed, "dtypes": Dtypes, "end": End},
    Timings,
    gather,
)
MARK: Final = b'"muster_timing"'
MARKED_BYTES: Final = 4096  # the mark is near the beginning of a result file


def is_timing(path: Path) -> bool:
    """Return True if a run or a file has timings of models; False if it cannot be read."""
    try:
        with open_file(newest(path) if path.is_dir() else path, owned=False) as opened:
            start = opened.read(MARKED_BYTES)
    except (OSError, NotFoundError):
        return False
    try:
        first = parse_json(start.partition(b"\n")[0])
    except ValueError:
        return MARK in start
    return isinstance(first, dict) and (first.get("record") == "timing" or "muster_timing" in first)


def read_timings(paths: Sequence[Path]) -> Timings:
    """Read runs or files into one `Timings`; errors as for `Format.read`."""
    return Timings(timings=[timing for path in paths for timing in FORMAT.read(path).timings])


def write_timings(timings: Timings, path: Path) -> None:
    """Write timings as JSON by rename; errors as for `jobs.basics.files.write_text`."""
    write_text(path, timings.model_dump_json(indent=1) + "\n")


def write_csv(timings: Timings, path: Path) -> None:
    """Write all rows as CSV; errors as for `recorded.write`."""
    rows = ((timing, row) for timing in timings.timings for row in rows_of(timing))
    write_table(COLUMNS, ([value(*row) for value in COLUMNS.values()] for row in rows), path)


def _of(name: str) -> Callable[[TimingRecords, ModelRow], Any]:
    return lambda timing, row: getattr(row.timed, name)


def _summary(name: str) -> Callable[[TimingRecords, ModelRow], Any]:
    return lambda timing, row: getattr(row.timed.summary, name, None)


def _seconds(name: str) -> Callable[[TimingRecords, ModelRow], Any]:
    return lambda timing, row: None if (us := getattr(row, name)) is None else us / 1e6


COLUMNS: Final[dict[str, Callable[[TimingRecords, ModelRow], Any]]] = {
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
    "launches": lambda timing, row: row.launches,
    "foreign": lambda timing, row: (
        median(found) if (found := [f for f in row.launch_foreign if f is not None]) else None
    ),
    "median_s": _seconds("p50_us"),
    "low_s": _seconds("low_us"),
    "high_s": _seconds("high_us"),
    "confidence": lambda timing, row: row.confidence if row.is_measured else None,
    "rate": _of("rate"),
    "unit": lambda timing, row: f"{row.timed.unit}/s",
    "flops": _of("flops"),
    "flops_per_s": _of("flops_per_s"),
    "matmul_share": _of("matmul_share"),
    "peak_bytes": _of("peak_bytes"),
    "warm_up_s": lambda timing, row: " ".join(f"{each:g}" for each in row.timed.warm_up_s),
    "steps_s": lambda timing, row: " ".join(f"{each:g}" for each in row.timed.steps_s),
    "reason": _of("reason"),
}
