"""A chrome trace as it is kept: the profiler's own, with our steps and phases as lanes and without our marks.

Perfetto (ui.perfetto.dev) and chrome://tracing open the file as it is, compressed; so does Holistic Trace Analysis.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.files import write_bytes
from muster.jobs.basics.reading import open_file, parse_json, read_rest
from muster.jobs.trace.events import MARK, PROFILER_STEP, Step
from muster.jobs.trace.nesting import Nested
from muster.jobs.trace.operators import launched_in_steps

HOST_LANE: Final = 1  # numbers of threads; those of real ones are process ids, and nobody's is so small
DEVICE_LANE: Final = 2
MOST_PACKED: Final = 100  # times smaller than its text is a trace at most, 20 is usual
MOST_BYTES: Final = 1 << 30  # a minute of a profiled rank makes some 100 MB
QUICK: Final = 4  # of gzip's levels: half the time of the usual one, for a tenth more bytes


def with_phases(document: dict[str, Any], nested: Nested) -> dict[str, Any]:
    """Return a trace with lanes of our steps and phases, on the host and as the device got to them."""
    rows = document["traceEvents"]
    names = numbers_of_steps(rows, nested.trace.steps)  # the device's ranges have the host's names
    kept = [
        {**row, "name": names[row["name"]]} if row.get("name") in names else row
        for row in rows
        if not str(row.get("name", "")).startswith(MARK)
    ]
    process = _process_of(nested)
    lanes = [*_host_lane(process, nested.trace.steps)]
    lanes += _device_lane(process, nested) if nested.trace.has_device else []
    return {**document, "traceEvents": [*kept, *lanes]}


def write_trace(path: Path, document: dict[str, Any]) -> None:
    """Write a trace, compressed; errors as `write_bytes`."""
    # Holistic Trace Analysis searches the text for `"rank": 1`, with the space.
    data = json.dumps(document, separators=(",", ": "), ensure_ascii=False).encode()
    write_bytes(path, gzip.compress(data, compresslevel=QUICK, mtime=0))


def read_document(path: Path) -> dict[str, Any]:
    """Read a chrome trace, compressed or not.

    Raises:
        ValueError: it is no trace, or larger than `MOST_BYTES` once it is unpacked.
    """
    with open_file(path) as file:
        read = gzip.GzipFile(fileobj=file).read if path.suffix == ".gz" else file.read
        try:
            data = read_rest(read, min(MOST_BYTES, MOST_PACKED * (os.fstat(file.fileno()).st_size + (1 << 14))))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: is damaged: {error}") from error
    document: dict[str, Any] = parse_json(data, most=MOST_BYTES)
    return document


def numbers_of_steps(rows: Iterable[dict[str, Any]], steps: list[Step]) -> dict[str, str]:
    """Return, by the name that the profiler gave its range of a step, the one with the number of the metrics."""
    names: dict[str, str] = {}
    for row in rows if steps else ():
        if str(row.get("name", "")).startswith(PROFILER_STEP) and row.get("cat") == "user_annotation":
            following = [step.number for step in steps if float(row["ts"]) <= step.start_us]
            number = following[0] if following else steps[-1].number + 1  # begun, and not done
            names[row["name"]] = f"{PROFILER_STEP}{number}"
    return names


def _host_lane(process: object, steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    yield from _named(process, HOST_LANE, "steps and phases")
    for step in steps:
        yield _range(process, HOST_LANE, f"step {step.number}", step.start_us, step.end_us)
        for span in step.spans:
            yield _range(process, HOST_LANE, span.phase, span.start_us, span.end_us)


def _device_lane(process: object, nested: Nested) -> Iterator[dict[str, Any]]:
    """Yield one range for each stretch of kernels that one phase launched, in the order in which they ended."""
    yield from _named(process, DEVICE_LANE, "phases, on the device")
    begun: list[tuple[str, float, float]] = []
    for event, launch, step in sorted(launched_in_steps(nested), key=lambda found: found[0].start_us):
        phase = step.phase_at(launch.event.start_us)
        if phase is None:
            continue
        if begun and begun[-1][0] == phase:
            begun[-1] = (phase, begun[-1][1], max(begun[-1][2], event.end_us))
        else:  # streams overlap: a stretch begins where the one before has ended
            begun.append((phase, max(event.start_us, begun[-1][2] if begun else 0.0), event.end_us))
    for phase, start_us, end_us in begun:
        if start_us < end_us:
            yield _range(process, DEVICE_LANE, phase, start_us, end_us)


def _process_of(nested: Nested) -> object:
    return next((lane[0] for lane in nested.trace.host), 0)


def _range(process: object, lane: int, name: str, start_us: float, end_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": process,
        "tid": lane,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": {},
    }


def _named(process: object, lane: int, name: str) -> Iterator[dict[str, Any]]:
    common = {"ph": "M", "pid": process, "tid": lane, "ts": 0}
    yield {**common, "name": "thread_name", "args": {"name": name}}
    yield {**common, "name": "thread_sort_index", "args": {"sort_index": -10 + lane}}
