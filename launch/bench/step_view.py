"""`muster predict JOB.yaml`: the predicted step times of a job in each mode, its bucket sizes, and a rank's memory.

Compute times come from options, or from a finished run of the same model. Without them only communication and memory
are predicted.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import UsageError
from muster.launch.bench import loads
from muster.launch.bench.wanted import Wanted

if TYPE_CHECKING:
    from muster.collectives_bench.cost.buckets import BestSize, CurvePoint
    from muster.collectives_bench.cost.exposed import Compute
    from muster.collectives_bench.cost.load import RankLoad
    from muster.collectives_bench.cost.profile import Profile
    from muster.collectives_bench.cost.steps import ModePrediction, Ranking
    from muster.jobs.spec.job import Job

STANDARD_ERROR: Final = 0.10  # relative error assumed if the profile has no measured one


def predict(asked: Wanted) -> dict[str, Any]:
    """Return the prediction as plain values, in seconds and bytes.

    Raises:
        UsageError, JobFileError: if options or files are wrong.
        RefusedError: if the job does not train, or the profile lacks the job's world.
    """
    from muster.collectives_bench.cost import steps
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.bench import closed_forms
    from muster.launch.bench.source import source_of

    job = job_of(asked)
    profile = source_of(asked)
    backend = asked.backend or next((name for name in profile.backends if name), "gloo")
    ranks = loads.ranks_of(job, asked.job, "-n M")
    load = loads.load_of(job, ranks=ranks, backend=backend, microbatches=asked.microbatches)
    compute, source = compute_of(asked, job, load)
    limit = loads.memory_limit(asked.memory)
    rows = [steps.with_limit(row, limit) for row in steps.predict(asked.ways, load, compute, profile, job.nodes)]
    own = [] if asked.modes is not None else _own_product(job, load, limit)
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
    }
    assert isinstance(job.settings, TrainSettings)
    record["closed_forms"] = closed_forms.of_job(job.settings, load, profile, job.nodes, asked.ways)
    if asked.buckets is not None:
        record["buckets"] = _buckets(asked, load, compute, profile, job.nodes)
    return record


def _own_product(job: "Job", load: "RankLoad", limit: float | None) -> list[dict[str, Any]]:
    """Return the row of a job that combines modes; only its memory is predicted."""
    from muster.collectives_bench.cost import steps
    from muster.collectives_bench.cost.memory import memory_of
    from muster.jobs.spec.expand import split_text
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.bench.own_split import own_split

    assert isinstance(job.settings, TrainSettings)
    if not job.settings.is_product:
        return []
    way, of = own_split(job.settings, load)
    row = steps.ModePrediction(way, None, None, memory_of(way, of), True, ("the job's own; its step is not predicted",))
    return [{**_row(steps.with_limit(row, limit)), "mode": split_text(job.settings)}]


def job_of(asked: Wanted) -> "Job":
    """Load a `train:` job that has a known number of ranks.

    Raises:
        JobFileError, UsageError: if the file or an option is wrong.
        RefusedError: if the job does not train.
    """
    given = list(asked.overrides)
    if asked.nodes is not None:
        given.append(f"nodes={asked.nodes}")
    if asked.ranks_per_node is not None:
        given.append(f"ranks_per_node={asked.ranks_per_node}")
    job = loads.train_job(asked.job, given)
    loads.ranks_of(job, asked.job, "-n M")
    return job


def compute_of(asked: Wanted, job: "Job", load: "RankLoad") -> "tuple[Compute | None, str]":
    """Return a rank's compute times for its part of the batch, and a text naming their source.

    Raises:
        UsageError: if times come from both options and a run, or some are missing.
        RefusedError: if the run trained another model than the job.
    """
    from muster.collectives_bench.cost.exposed import Compute
    from muster.launch.bench.run_times import times_of_run

    given = (asked.forward_ms, asked.backward_ms, asked.optimizer_ms)
    if asked.measured_run is not None:
        if any(each is not None for each in given):
            raise UsageError(
                "--run: already gives compute times; leave out --forward-ms, --backward-ms and --optimizer-ms"
            )
        return times_of_run(asked.measured_run, asked.runs, job, samples=load.own_batch)
    if asked.forward_ms is None and asked.backward_ms is None:
        if asked.optimizer_ms is not None:
            raise UsageError("--optimizer-ms: needs --forward-ms and --backward-ms too")
        return None, ""
    if asked.forward_ms is None or asked.backward_ms is None:
        raise UsageError("--forward-ms and --backward-ms belong together; give both, or --run RUN")
    for name, value in zip(("--forward-ms", "--backward-ms", "--optimizer-ms"), given, strict=True):
        if value is not None and not (0 <= value < math.inf):
            raise UsageError(f"{name}: must be a number of at least 0, got {value}")
    return Compute(asked.forward_ms / 1e3, asked.backward_ms / 1e3, (asked.optimizer_ms or 0.0) / 1e3), "given"


def _row(row: "ModePrediction") -> dict[str, Any]:
    return {
        "mode": row.way.name,
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
    asked: Wanted, load: "RankLoad", compute: "Compute | None", profile: "Profile", nodes: int
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
        bucket_sizes(asked.buckets) or buckets.SWEEP,
        own_buckets(load),
    )
    error = profile.held_out_sizes.mean if profile.held_out_sizes else STANDARD_ERROR
    return _choice(points, buckets.choose(points, error))


def bucket_sizes(text: str | None) -> Sequence[int]:
    """Return the sizes in `--buckets`, or [] if the option has no value.

    Raises:
        UsageError: if the text has an invalid size.
    """
    from muster.collectives_bench.sizes import parse_sizes

    try:
        return sorted(set(parse_sizes(text))) if text else []
    except ValueError as error:
        raise UsageError(f"--buckets: {error}") from error


def _choice(points: "Sequence[CurvePoint]", choice: "BestSize") -> dict[str, Any]:
    return {
        "points": [vars(point) for point in points],
        "best": choice.best.bucket_bytes,
        "runner_up": choice.runner_up and choice.runner_up.bucket_bytes,
        "margin": choice.margin,
        "torch_margin": choice.torch_margin,
        "error": choice.error,
        "clear": choice.is_clear,
    }
