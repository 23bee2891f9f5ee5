"""`muster memory JOB.yaml`: what the fullest rank of a job would hold in every mode, as records and as a table."""

import argparse
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from jobs.errors import RefusedError, UsageError
from jobs.words import counted
from launch.bench import loads

COLUMNS: Final = (
    "",
    "mode",
    "parameters>",
    "gradients>",
    "optimizer>",
    "buffers>",
    "communication>",
    "activations>",
    "total>",
    "note",
)
KINDS: Final = ("parameters", "gradients", "optimizer", "buffers", "communication", "activations")
LEGEND: Final = """\
of the rank that holds most; 1 MB is 2^20 bytes. communication: what gradients and parameters pass through;
total: with all activations there, the largest gradient twice where several backwards add up, and float32 gradients
of a 16-bit step where those are more. Not counted: Python with torch (300 MB on a CPU, a CUDA context on a GPU),
freed blocks that the allocator keeps, scratch memory of kernels."""


def predict(args: argparse.Namespace) -> dict[str, Any]:
    """Return everything as plain values, in bytes.

    Raises:
        UsageError, JobFileError: options or files are wrong.
        RefusedError: the job does not train.
    """
    from collectives_bench.cost import modes
    from collectives_bench.cost.memory import memory_of
    from collectives_bench.cost.steps import USABLE
    from jobs.train_parallel import split_text
    from jobs.train_settings import TrainSettings
    from launch.bench.own_split import at_world, own_split

    job = loads.train_job(args.target, args.overrides)
    settings = job.settings
    assert isinstance(settings, TrainSettings)
    if args.world is not None and args.world < 1:
        raise UsageError(f"--world {args.world}: must be 1 or more")
    ranks = args.world or loads.ranks_of(job, args.target, "--world N")
    backend = args.backend or ("nccl" if settings.device == "cuda" else "gloo")
    load = loads.load_of(job, ranks=ranks, backend=backend, microbatches=args.microbatches)
    limit = loads.memory_limit(args.memory)
    chosen = modes.ways(None if args.modes is None else [name.strip() for name in args.modes.split(",")])
    wanted = [(way.name, way, load, way.name == settings.mode_name and not settings.is_product) for way in chosen]
    unfit = ""
    if settings.is_product and args.modes is None:
        try:
            scaled = settings if args.world is None else at_world(settings, ranks)
            way, of = own_split(scaled, load)
            of = of if args.microbatches is None else replace(of, microbatches=load.microbatches)
            wanted.append((split_text(scaled), way, of, True))
        except RefusedError as error:
            if args.world is None:
                raise
            unfit = str(error)
    elif args.world is None and args.microbatches is None:
        with suppress(RefusedError):  # a mode's own line says why
            own = (split_text(settings), *own_split(settings, load), True)  # cut as the job says
            wanted = [own if each[-1] else each for each in wanted]
    rows = []
    for name, way, of, is_jobs in wanted:
        memory = memory_of(way, of)
        rows.append(
            {
                "mode": name,
                "is_jobs": is_jobs,
                "built": way.is_built,
                "memory": memory and {**vars(memory), "total": memory.total},
                "fits": None if memory is None or limit is None else memory.total <= USABLE * limit,
            }
        )
    if unfit:
        nothing = {"built": True, "memory": None, "fits": None, "note": unfit}
        rows.append({"mode": split_text(settings), "is_jobs": True, **nothing})
    return {
        "job": job.name,
        "model": load.model.name,
        "parameters": load.model.elements,
        "precision": settings.precision,
        "optimizer": settings.optimizer.name,
        "batch": load.batch,
        "ranks": ranks,
        "backend": backend,
        "memory_limit": limit,
        "modes": rows,
    }


def render(record: dict[str, Any]) -> str:
    """Lay the records out."""
    from launch.look import screen

    head = (
        f"job {record['job']}: {record['model']}, {record['parameters'] / 1e6:.4g} million parameters, "
        f"{record['precision']}, {record['optimizer']}, batch {record['batch']} on {counted(record['ranks'], 'rank')}, "
        f"{record['backend']}"
    )
    rows = [_row(row, record) for row in record["modes"]]
    lines = [head, "", screen.table(COLUMNS, rows), "", LEGEND]
    if any(row["is_jobs"] for row in record["modes"]):
        lines.append("*  the job's own mode")
    return "\n".join(lines)


def _row(row: dict[str, Any], record: dict[str, Any]) -> list[str | None]:
    from collectives_bench.sizes import size_text

    notes = [] if row["built"] else ["not built yet"]
    mark = "*" if row["is_jobs"] else ""
    if row["memory"] is None:
        what = "has no width to cut" if row["mode"] == "tensor" else "has too few layers"
        note = row.get("note") or f"{record['model']} {what}"
        return [mark, row["mode"], *[None] * 7, "; ".join([*notes, note])]
    if row["fits"] is False:
        notes.append(f"does not fit into {size_text(record['memory_limit'])}, of which nine tenths are used")
    sizes = [size_text(row["memory"][kind]) if row["memory"][kind] else "0" for kind in (*KINDS, "total")]
    return [mark, row["mode"], *sizes, "; ".join(notes)]
