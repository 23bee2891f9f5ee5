"""Write a rank's profile to its folder of the attempt: the trace, and the tables and flame graphs derived from it."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from muster.jobs.basics.files import folder_error, make_folder, write_inside, write_json
from muster.jobs.runfolder.profiledir import ProfileDir
from muster.jobs.trace.chrome import read_document, with_phases, write_trace
from muster.jobs.trace.events import read_trace
from muster.jobs.trace.flame import data_of, device_flame, host_flame, render
from muster.jobs.trace.memory import HeldStorage, memory_of
from muster.jobs.trace.nesting import Nested, nest_trace
from muster.jobs.trace.record import numbers, operators_csv, operators_text, record_of
from muster.jobs.train.profiling.memory import AllocatorHistory, peaks


def write_profile(
    folder: ProfileDir,
    profiler: profile,
    history: AllocatorHistory | None,
    held: tuple[list[HeldStorage], list[HeldStorage]],
    device: torch.device,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write a rank's profile; return its record. `held` lists the state's storages before and after the recorded steps.

    Raises:
        RunFolderError, StorageError: if the folder cannot be written.
    """
    try:
        with suppress(FileExistsError):
            make_folder(folder.path)
    except OSError as error:
        raise folder_error(folder.path, error) from error
    files = [folder.trace, folder.operators, folder.operators_csv]
    if history is not None:
        history.write(folder.cuda_memory)
        files.append(folder.cuda_memory)
    document = exported(folder, profiler)
    nested = nest_trace(read_trace(document["traceEvents"]))
    write_trace(folder.trace, with_phases(document, nested))
    record = record_of(nested, {**facts, "memory": peaks(device)}) | memory_of(nested, *held)
    write_inside(folder.operators, operators_text(record).encode())
    write_inside(folder.operators_csv, operators_csv(record["operators"] + record["kernels"]).encode())
    files += write_flames(folder, nested, record)
    record["files"] = [path.name for path in files]
    write_json(folder.record, record)
    return record


def exported(folder: ProfileDir, profiler: profile) -> dict[str, Any]:
    """Return the Chrome trace that the profiler exports."""
    try:
        profiler.export_chrome_trace(str(folder.raw_trace))
        return read_document(folder.raw_trace)
    finally:
        folder.raw_trace.unlink(missing_ok=True)


def write_flames(folder: ProfileDir, nested: Nested, record: Mapping[str, Any]) -> list[Path]:
    """Write the flame graphs, both as drawings and as data; return the paths."""
    what = f"rank {record['rank']}, {numbers([step['step'] for step in record['steps']])}"
    flames = [(host_flame(nested), folder.flame, folder.flame_data, "time of the host's threads")]
    if nested.trace.has_device:
        paths = folder.cuda_flame, folder.cuda_flame_data
        flames.append((device_flame(nested), *paths, "time of CUDA kernels, by the code that launched them"))
    for root, drawing, data, title in flames:
        write_inside(drawing, render(root, f"{what}: {title}").encode())
        write_json(data, data_of(root))
    return [path for _, drawing, data, _ in flames for path in (drawing, data)]
