"""`muster memory JOB.yaml`: the predicted memory of a job's fullest rank in each mode, as records and as a table."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import RefusedError, UsageError
from muster.jobs.basics.words import counted
from muster.launch.bench import counting, loads
from muster.launch.bench.wanted import Wanted

if TYPE_CHECKING:
    from muster.collectives_bench.cost.load import RankLoad
    from muster.collectives_bench.cost.modes import Way
    from muster.jobs.models.counted import Counted
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.train import TrainSettings

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
Sizes are those of the rank with the largest total; 1 MB is 2^20 bytes. communication: buffers for sending gradients and
parameters. total: memory at the peak, when all activations exist; it includes a second copy of the largest gradient if
several backward passes accumulate, or the float32 gradients of a 16-bit step if those are larger. Not counted: Python
with torch (300 MB on a CPU, a CUDA context on a GPU), the allocator's cached blocks, and scratch memory of kernels."""


def predict(asked: Wanted) -> dict[str, Any]:
    """Return the prediction as plain values, in bytes.

    Raises:
        UsageError, JobFileError: if options or files are wrong.
        RefusedError: if the job does not train.
    """
    from muster.jobs.spec.train import TrainSettings

    job = loads.train_job(asked.job, asked.overrides)
    settings = job.settings
    assert isinstance(settings, TrainSettings)
    if asked.world is not None and asked.world < 1:
        raise UsageError(f"--world {asked.world}: must be 1 or more")
    ranks = asked.world or loads.ranks_of(job, asked.job, "--world N")
    backend = asked.backend or ("nccl" if settings.device == "cuda" else "gloo")
    own = counting.own_code(job, settings)
    load = loads.load_of(job, ranks=ranks, backend=backend, microbatches=asked.microbatches, own=own)
    limit = loads.memory_limit(asked.memory)
    return {
        "job": job.name,
        "model": load.model.name,
        "parameters": load.model.elements,
        "precision": settings.precision,
        "optimizer": settings.optimizer.make or settings.optimizer.name,
        "batch": load.batch,
        "ranks": ranks,
        "backend": backend,
        "memory_limit": limit,
        "activations_unknown": None if own.model is None else own.model.no_activations or None,
        "modes": _modes(asked, settings, load, limit, own.model),
        **_copies(job, load),
    }


def _copies(job: "Job", load: "RankLoad") -> dict[str, Any]:
    from muster.collectives_bench.cost.memory import copies_cost

    if job.checkpoint is None or job.checkpoint.memory_every_steps is None:
        return {}
    per_node = job.ranks_per_node if isinstance(job.ranks_per_node, int) else -(-load.ranks // job.nodes)
    nodes = -(-load.ranks // per_node)
    return {"copies": {"nodes": nodes, **vars(copies_cost(load, nodes, job.checkpoint.memory_every_steps))}}


def copies_text(copies: dict[str, Any]) -> str:
    """Describe what checkpoints in memory cost a node."""
    from muster.collectives_bench.sizes import size_text

    held, most = size_text(copies["held"]), size_text(copies["most"])
    text = f"copies of the state every {copies['every_steps']} steps, besides the memory of the ranks: {held} on a node"
    if copies["nodes"] == 1:
        return f"{text}, and {most} while the next copy is made; nothing is sent, because there is one node"
    return (
        f"{text} (its own part and that of another node), and {most} while the next copy is made;\n"
        f"a node sends {size_text(copies['sent'])} per copy, {size_text(copies['sent_per_step'])} per step"
    )


def _modes(
    asked: Wanted,
    settings: "TrainSettings",
    load: "RankLoad",
    limit: float | None,
    made: "Counted | None",
) -> list[dict[str, Any]]:
    """Return a row for each requested mode, and one for the job's own combination of modes, if it combines several."""
    from muster.jobs.spec.expand import split_text
    from muster.launch.bench.own_split import at_world, own_split

    rows = {way.name: _of_way(way.name, way, load, limit) for way in asked.ways}
    if not settings.is_product and settings.mode_name in rows:
        if asked.world is None and asked.microbatches is None:
            with suppress(RefusedError):  # the mode's own row gives the reason
                way, of = own_split(settings, load)  # with the stages that the job sets
                rows[settings.mode_name] = _of_way(split_text(settings), way, of, limit)
        rows[settings.mode_name]["is_jobs"] = True
    if settings.is_product and asked.modes is None:
        try:
            scaled = settings if asked.world is None else at_world(settings, load.ranks)
            way, of = own_split(scaled, load)
            of = of if asked.microbatches is None else replace(of, microbatches=load.microbatches)
            own = _of_way(split_text(scaled), way, of, limit)
        except RefusedError as error:
            if asked.world is None and made is None:
                raise
            own = {"mode": split_text(settings), "memory": None, "fits": None, "note": str(error)}
        rows[""] = {**own, "is_jobs": True}
    if made is not None:
        families: dict[str, list[str]] = {way.name: [way.family] for way in asked.ways}
        families[""] = ["pipe"] * settings.is_pipeline + ["tensor"] * settings.splits_layers
        for name, row in rows.items():
            if why := "; ".join(filter(None, map(made.why_not, families[name]))):
                row |= {"memory": None, "fits": None, "note": why}
    return list(rows.values())


def _of_way(name: str, way: "Way", load: "RankLoad", limit: float | None) -> dict[str, Any]:
    from muster.collectives_bench.cost.memory import masters_alone_text, memory_of
    from muster.collectives_bench.cost.steps import USABLE

    memory = memory_of(way, load)
    total = math.nan if memory is None else memory.total
    known = None if memory is None else {**vars(memory), "total": total}
    return {
        "mode": name,
        "is_jobs": False,
        "memory": known and {kind: None if math.isnan(value) else value for kind, value in known.items()},
        "fits": None if math.isnan(total) or limit is None else total <= USABLE * limit,
        "explained": memory and masters_alone_text(memory),
    }


def render(record: dict[str, Any]) -> str:
    """Format the records as text."""
    from muster.launch.common import screen

    head = (
        f"job {record['job']}: {record['model']}, {record['parameters'] / 1e6:.4g} million parameters, "
        f"{record['precision']}, {record['optimizer']}, batch {record['batch']} on {counted(record['ranks'], 'rank')}, "
        f"{record['backend']}"
    )
    rows = [_row(row, record) for row in record["modes"]]
    lines = [head, "", screen.table(COLUMNS, rows), "", LEGEND]
    if why := record["activations_unknown"]:
        lines.append(f"activations are unknown, and so are totals: {why}")
    lines += [row["explained"] for row in record["modes"] if row["memory"] and row["explained"]]
    if "copies" in record:
        lines.append(copies_text(record["copies"]))
    if any(row["is_jobs"] for row in record["modes"]):
        lines.append("*  the job's own mode")
    return "\n".join(lines)


def _row(row: dict[str, Any], record: dict[str, Any]) -> list[str | None]:
    from muster.collectives_bench.sizes import size_text

    mark = "*" if row["is_jobs"] else ""
    if row["memory"] is None:
        what = "has no width to split" if row["mode"] == "tensor" else "has too few layers"
        note = row.get("note") or f"{record['model']} {what}"
        return [mark, row["mode"], *[None] * 7, note]
    notes = []
    if row["fits"] is False:
        notes.append(f"does not fit into nine tenths of {size_text(record['memory_limit'])}")
    if row["explained"]:
        notes.append("0 parameters: see the note below")
    values = [row["memory"][kind] for kind in (*KINDS, "total")]
    sizes = ["?" if value is None else size_text(value) if value else "0" for value in values]
    return [mark, row["mode"], *sizes, "; ".join(notes)]
