"""Fill in the settings of a job that depend on the number of its ranks."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from muster.jobs.spec import yamlfile
from muster.jobs.spec.expand import given_microbatches, microbatches_of
from muster.jobs.spec.train import TrainSettings

if TYPE_CHECKING:
    from muster.jobs.runfolder.rundir import RunDir
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.load import LoadedJob


def fixed(job: "Job", world_size: int, *, cores: int | None = None, run: "RunDir | None" = None) -> "Job":
    """Return the job with fixed values for settings that depend on its world and that its results depend on.

    They are fixed here, once: an attempt on other numbers of ranks must continue with the same values.

        batch_size          in place of batch_size_per_rank
        microbatches        with `exact`: the default number of a pipeline depends on its stages
        threads_per_rank    with `exact`, if all ranks share the `cores` of this machine

    An earlier version may have submitted `run`, which is resumed, without these values: its first attempt decides.

    Raises:
        RefusedError: if the job cannot be split over so many ranks.
    """
    settings = job.settings
    if not isinstance(settings, TrainSettings):
        return job
    changes: dict[str, Any] = {}
    if settings.batch_size_per_rank is not None:
        batch = settings.batch_size_per_rank * settings.split(world_size).data
        changes = {"batch_size": batch, "batch_size_per_rank": None}
        settings = settings.model_copy(update=changes)
    of_job: dict[str, Any] = {}
    if settings.exact:
        sizes = () if run is None else (run.attempt(each).world_size for each in run.attempt_numbers())
        first = next(filter(None, sizes), world_size)
        if settings.is_pipeline and settings.mode_name != "model" and given_microbatches(settings) is None:
            changes["microbatches"] = microbatches_of(settings, first)
        if cores is not None and job.threads_per_rank == "auto":
            of_job["threads_per_rank"] = max(1, cores // first)
    if changes:
        of_job["settings"] = settings.model_copy(update=changes)
    return job.model_copy(update=of_job) if of_job else job


def with_fixed(loaded: "LoadedJob", job: "Job") -> "LoadedJob":
    """Return a loaded job whose text has the values of `job`, as `fixed` returned it."""
    if job is loaded.job or not isinstance(job.settings, TrainSettings):
        return loaded
    whole, settings = loaded.document.mapping(), job.settings
    now = {"batch_size": settings.batch_size, "microbatches": settings.microbatches}
    section = {key: value for key, value in whole["train"].items() if key != "batch_size_per_rank"}
    section |= {key: value for key, value in now.items() if value != getattr(loaded.job.settings, key)}
    threads = {} if job.threads_per_rank == "auto" else {"threads_per_rank": job.threads_per_rank}
    return replace(loaded, job=job, text=yamlfile.dump({**whole, **threads, "train": section}))
