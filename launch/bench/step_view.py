"""`muster predict JOB.yaml`: a job's steps in every mode, its buckets, and the memory of a rank, as tables.

Compute times are given, or those of a finished run of the same model; without them only communication and memory are
predicted.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import UsageError
from muster.launch.bench import loads
from muster.launch.common import options

if TYPE_CHECKING:
    from muster.collectives_bench.cost.buckets import Choice, Point
    from muster.collectives_bench.cost.exposed import Compute
    from muster.collectives_bench.cost.load import Load
    from muster.collectives_bench.cost.profile import Profile
    from muster.collectives_bench.cost.steps import Ranking, Row
    from muster.jobs.spec.job import Job

STANDARD_ERROR: Final = 0.10  # of a profile that was not measured, or does not say


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a job's steps; the job itself, the profile and --json are the command's."""
    steps = parser.add_argument_group("a job's steps")
    steps.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one value of the job, as in train.batch_size=256; may be repeated",
    )
    steps.add_argument("-n", "--ranks-per-node", metavar="M", type=int, help="as --set ranks_per_node=M")
    steps.add_argument("--modes", metavar="NAMES", help="only these, with commas (default: all, built or not)")
    steps.add_argument("--microbatches", metavar="M", type=int, help="of pipelines (default: the job's, else 8)")
    steps.add_argument("--memory", metavar="SIZE", help="of a rank, such as 80G: a mode may fill nine tenths of it")
    steps.add_argument("--buckets", metavar="SIZES", nargs="?", const="", help="the curve over bucket sizes, 1M:64M")
    steps.add_argument("--plot", metavar="FILE", help="draw it too: .png, .svg or .pdf")
    compute = parser.add_argument_group("how long a rank computes for its part of a batch")
    for name in ("forward", "backward", "optimizer"):
        compute.add_argument(f"--{name}-ms", metavar="MS", type=float, help=f"its {name}, in milliseconds")
    compute.add_argument("--run", metavar="RUN", dest="measured_run", help="or a run of this model that measured it")
    options.add_runs(compute)


def run(args: argparse.Namespace) -> int:
    """Predict, then print records or tables.

    Raises:
        UsageError, JobFileError: options or files are wrong.
        RefusedError: the job does not train, or the profile does not know its world.
    """
    from muster.launch.bench import step_text

    record = predict(args)
    if args.plot is not None:
        from muster.launch.bench import choices, step_plot

        choices.check_output("--plot", args.plot, choices.PLOTS)
        step_plot.plot(record, Path(args.plot))
    print(json.dumps(record, indent=1) if args.json else step_text.render(record))
    return 0


def predict(args: argparse.Namespace) -> dict[str, Any]:
    """Return everything as plain values: seconds and bytes."""
    from muster.collectives_bench.cost import modes, steps
    from muster.launch.bench.source import source_of

    job = job_of(args)
    profile = source_of(args)
    backend = args.backend or next((name for name in profile.backends if name), "gloo")
    ranks = loads.ranks_of(job, args.job, "-n M")
    load = loads.load_of(job, ranks=ranks, backend=backend, microbatches=args.microbatches)
    compute, source = compute_of(args, job, load)
    wanted = modes.ways(None if args.modes is None else [name.strip() for name in args.modes.split(",")])
    limit = loads.memory_limit(args.memory)
    rows = [steps.with_limit(row, limit) for row in steps.predict(wanted, load, compute, profile, job.nodes)]
    own = [] if args.modes is not None else _own_product(job, load, limit)
    record: dict[str, Any] = {
        "job": job.name,
        "model": load.model.name,
        "parameters": load.model.elements,
        "ranks": load.ranks,
        "nodes": job.nodes,
        "batch": load.batch,
        "profile": profile.name,
        "compute": compute and {**vars(compute), "source": source},
        "memory_limit": limit,
        "steps": [*(_row(row) for row in rows), *own],
        "not_predicted": own[0]["mode"] if own else None,
        "ranking": _ranking(steps.rank(rows)),
        "ranking_built": _ranking(steps.rank(rows, built=True)),
    }
    if args.buckets is not None:
        record["buckets"] = _buckets(args, load, compute, profile, job.nodes)
    return record


def _own_product(job: "Job", load: "Load", limit: float | None) -> list[dict[str, Any]]:
    """Return the row of a job that is split in more ways than one, of which memory alone is predicted."""
    from muster.collectives_bench.cost import steps
    from muster.collectives_bench.cost.memory import memory_of
    from muster.jobs.spec.expand import split_text
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.bench.own_split import own_split

    assert isinstance(job.settings, TrainSettings)
    if not job.settings.is_product:
        return []
    way, of = own_split(job.settings, load)
    row = steps.Row(way, None, None, memory_of(way, of), True, ("the job's own; its step is not predicted",))
    return [{**_row(steps.with_limit(row, limit)), "mode": split_text(job.settings)}]


def job_of(args: argparse.Namespace) -> "Job":
    """Load the job; it must train, on a number of ranks that is known.

    Raises:
        JobFileError, UsageError: it is wrong.
        RefusedError: it does not train.
    """
    given = list(args.overrides)
    if args.nodes is not None:
        given.append(f"nodes={args.nodes}")
    if args.ranks_per_node is not None:
        given.append(f"ranks_per_node={args.ranks_per_node}")
    job = loads.train_job(args.job, given)
    loads.ranks_of(job, args.job, "-n M")
    return job


def compute_of(args: argparse.Namespace, job: "Job", load: "Load") -> "tuple[Compute | None, str]":
    """Return how long a rank computes for its part of the batch, and where that is from.

    Raises:
        UsageError: times are given twice, or not all that are needed.
        RefusedError: the run does not fit.
    """
    from muster.collectives_bench.cost.exposed import Compute
    from muster.launch.bench.run_times import times_of_run

    given = (args.forward_ms, args.backward_ms, args.optimizer_ms)
    if args.measured_run is not None:
        if any(each is not None for each in given):
            raise UsageError("--run: has compute times already; leave --forward-ms, --backward-ms, --optimizer-ms out")
        return times_of_run(args.measured_run, args.runs, job, samples=load.own_batch)
    if args.forward_ms is None and args.backward_ms is None:
        if args.optimizer_ms is not None:
            raise UsageError("--optimizer-ms: needs --forward-ms and --backward-ms too")
        return None, ""
    if args.forward_ms is None or args.backward_ms is None:
        raise UsageError("--forward-ms and --backward-ms belong together; give both, or --run RUN")
    for name, value in zip(("--forward-ms", "--backward-ms", "--optimizer-ms"), given, strict=True):
        if value is not None and not (0 <= value < math.inf):
            raise UsageError(f"{name}: must be 0 or more, and a number, got {value}")
    return Compute(args.forward_ms / 1e3, args.backward_ms / 1e3, (args.optimizer_ms or 0.0) / 1e3), "given"


def _row(row: "Row") -> dict[str, Any]:
    return {
        "mode": row.way.name,
        "built": row.way.is_built,
        "compute_s": row.compute_s,
        "exposed": row.exposed and vars(row.exposed),
        "step": row.step and vars(row.step),
        "memory": row.memory and {**vars(row.memory), "total": row.memory.total},
        "fits": row.fits,
        "notes": list(row.notes),
    }


def _ranking(ranking: "Ranking | None") -> dict[str, Any] | None:
    if ranking is None:
        return None
    return {
        "best": ranking.best.way.name,
        "runner_up": ranking.runner_up and ranking.runner_up.way.name,
        "margin": ranking.margin,
        "clear": ranking.is_clear,
    }


def _buckets(
    args: argparse.Namespace, load: "Load", compute: "Compute | None", profile: "Profile", nodes: int
) -> dict[str, Any]:
    """Predict the curve over bucket sizes of data-parallel training."""
    from muster.collectives_bench.cost import buckets
    from muster.collectives_bench.cost.exposed import NO_COMPUTE, Times, own_buckets

    known = compute or NO_COMPUTE
    times = Times(profile, load, nodes, "seconds")
    gradients = buckets.registered(load.model, load.recipe.gradient, known.backward_s)
    points = buckets.curve(
        gradients,
        lambda nbytes: times.of("all_reduce", load.sent_bytes(nbytes), back_to_back=True),
        buckets.Lanes.of(load.backend),
        bucket_sizes(args.buckets) or buckets.SWEEP,
        own_buckets(load),
    )
    error = profile.held_out_sizes.mean if profile.held_out_sizes else STANDARD_ERROR
    return _choice(points, buckets.choose(points, error))


def bucket_sizes(text: str) -> Sequence[int]:
    """Return the sizes that `--buckets` names; none where it names none.

    Raises:
        UsageError: they are none.
    """
    from muster.collectives_bench.sizes import parse_sizes

    try:
        return sorted(set(parse_sizes(text))) if text else []
    except ValueError as error:
        raise UsageError(f"--buckets: {error}") from error


def _choice(points: "Sequence[Point]", choice: "Choice") -> dict[str, Any]:
    return {
        "points": [vars(point) for point in points],
        "best": choice.best.bucket_bytes,
        "runner_up": choice.runner_up and choice.runner_up.bucket_bytes,
        "margin": choice.margin,
        "torch_margin": choice.torch_margin,
        "error": choice.error,
        "clear": choice.is_clear,
    }
