"""The compute times of a finished run's slowest rank (forward, backward, optimizer), read from its metrics."""

from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import read_lines
from muster.jobs.runfolder.rundir import RunDir, find_run, runs_root
from muster.launch.common.fields import real

if TYPE_CHECKING:
    from muster.collectives_bench.cost.exposed import Compute
    from muster.jobs.spec.job import Job

MOST_STEPS: Final = 1_000_000
# number of first steps, which are slow: caches are cold, and DistributedDataParallel rebuilds its buckets
SKIPPED: Final = 2
PHASES: Final = ("forward_s", "backward_s", "optimizer_s")


def times_of_run(given: str, runs: str | None, job: "Job", *, samples: int) -> "tuple[Compute, str]":
    """Return compute times from a run of the same model, scaled to `samples` per rank, and a text naming their source.

    Forward and backward times are assumed to be proportional to the number of samples.

    Raises:
        NotFoundError: if the run does not exist.
        RefusedError: if the run trained another model, or too few steps.
    """
    from muster.collectives_bench.cost.exposed import Compute

    run = find_run(runs_root(runs), given)
    _must_be_alike(run, job)
    ranks = [found for path in _newest(run) if (found := _of_rank(path))]
    if not ranks:
        raise RefusedError(
            f"--run {given}: has at most {SKIPPED} steps with times; train more steps, or give --forward-ms"
        )
    slowest = max(ranks, key=lambda times: times["forward_s"] + times["backward_s"])
    scale = samples / slowest["samples"]
    source = f"the slowest of {len(ranks)} ranks of {run.run_id}, medians of {slowest['steps']:.0f} steps"
    if scale != 1:
        source += f", for {samples} samples instead of {slowest['samples']:.0f}"
    return Compute(slowest["forward_s"] * scale, slowest["backward_s"] * scale, slowest["optimizer_s"]), source


def _must_be_alike(run: RunDir, job: "Job") -> None:
    from muster.jobs.spec.load import load_job
    from muster.launch.common.kinds import KINDS

    other = load_job(run.job, KINDS, allow_unread=True).job
    if other.kind != "train":
        raise RefusedError(f"--run {run.run_id}: is a {other.kind}: job; name a run that trained")
    for key in ("model", "precision"):
        theirs, ours = getattr(other.settings, key), getattr(job.settings, key)
        if theirs != ours:
            raise RefusedError(
                f"--run {run.run_id}: its train.{key} differs from the job's; name a run of the same {key}"
            )


def _newest(run: RunDir) -> list[Path]:
    """List the ranks' metrics files of the newest attempt that has any."""
    for number in reversed(run.attempt_numbers()):
        if found := sorted(run.attempt(number).path.glob("metrics-*.jsonl")):
            return found
    return []


def _of_rank(path: Path) -> dict[str, float]:
    """Return the medians over a rank's steps; {} if there are too few steps."""
    wanted = (*PHASES, "samples")
    every = ({name: real(row.get(name)) for name in wanted} for row in read_lines(path) if "backward_s" in row)
    rows = list(islice((row for row in every if None not in row.values() and row["samples"]), SKIPPED, MOST_STEPS))
    if not rows:
        return {}
    return {**{name: median(row[name] or 0.0 for row in rows) for name in wanted}, "steps": len(rows)}
