"""The Chrome trace of a profile: PyTorch's trace with lanes for steps and phases added, and Muster's marks removed.

Perfetto (ui.perfetto.dev), chrome://tracing and Holistic Trace Analysis open the compressed file directly.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.files import write_inside
from muster.jobs.basics.reading import open_file, parse_json, read_rest
from muster.jobs.trace.events import MARK, PROFILER_STEP, ProfiledStep
from muster.jobs.trace.nesting import Nested
from muster.jobs.trace.operators import launched_in_steps

HOST_LANE: Final = 1  # thread ids of the two added lanes; ids of real threads are never this small
DEVICE_LANE: Final = 2
MOST_PACKED: Final = 100  # limit for the compression ratio of a trace; 20 is usual
MOST_BYTES: Final = 1 << 30  # limit for an uncompressed trace; a minute of a rank takes about 100 MB
QUICK: Final = 4  # gzip level: takes half the time of the default level and writes 10 % more bytes


def with_phases(document: dict[str, Any], nested: Nested) -> dict[str, Any]:
    """Add a lane with the steps and phases of the host, and one with the phases of the kernels on the device."""
    rows = document["traceEvents"]
    names = numbers_of_steps(rows, nested.trace.steps)  # the profiler gives a step's range on the device the same name
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
    """Compress a trace and write it to `path`; errors as for `write_bytes`."""
    # The separator after a key contains a space, because Holistic Trace Analysis searches the text for `"rank": 1`.
    data = json.dumps(document, separators=(",", ": "), ensure_ascii=False).encode()
    write_inside(path, gzip.compress(data, compresslevel=QUICK, mtime=0))


def read_document(path: Path) -> dict[str, Any]:
    """Read a Chrome trace, compressed or not.

    Raises:
        ValueError: if the file is damaged, is not JSON, or is too large when decompressed.
    """
    with open_file(path) as file:
        read = gzip.GzipFile(fileobj=file).read if path.suffix == ".gz" else file.read
        try:
            data = read_rest(read, min(MOST_BYTES, MOST_PACKED * (os.fstat(file.fileno()).st_size + (1 << 14))))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: is damaged: {error}") from error
    document: dict[str, Any] = parse_json(data, most=MOST_BYTES)
    return document


def numbers_of_steps(rows: Iterable[dict[str, Any]], steps: list[ProfiledStep]) -> dict[str, str]:
    """Map the profiler's name of each step (it counts recorded steps) to a name with the step's number in training."""
    names: dict[str, str] = {}
    for row in rows if steps else ():
        if str(row.get("name", "")).startswith(PROFILER_STEP) and row.get("cat") == "user_annotation":
            following = [step.number for step in steps if float(row["ts"]) <= step.start_us]
            number = following[0] if following else steps[-1].number + 1  # this step began but did not end
            names[row["name"]] = f"{PROFILER_STEP}{number}"
    return names


def _host_lane(process: object, steps: Iterable[ProfiledStep]) -> Iterator[dict[str, Any]]:
    yield from _named(process, HOST_LANE, "steps and phases")
    for step in steps:
        yield _range(process, HOST_LANE, f"step {step.number}", step.start_us, step.end_us)
        for span in step.spans:
            yield _range(process, HOST_LANE, span.phase, span.start_us, span.end_us)


def _device_lane(process: object, nested: Nested) -> Iterator[dict[str, Any]]:
    """Yield one range for each series of kernels that the same phase launched, in the order of their starts."""
    yield from _named(process, DEVICE_LANE, "phases on the device")
    begun: list[tuple[str, float, float]] = []
    for event, launch, step in sorted(launched_in_steps(nested), key=lambda found: found[0].start_us):
        phase = step.phase_at(launch.event.start_us)
        if phase is None:
            continue
        if begun and begun[-1][0] == phase:
            begun[-1] = (phase, begun[-1][1], max(begun[-1][2], event.end_us))
        else:  # kernels of several streams overlap, so a range begins no earlier than the previous one ends
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
