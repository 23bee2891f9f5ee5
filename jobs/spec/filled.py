"""Fill in the settings of a job that depend on the number of its ranks."""

from dataclasses import replace
from typing import TYPE_CHECKING

from muster.jobs.spec import yamlfile
from muster.jobs.spec.train import TrainSettings

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.load import LoadedJob


def fixed_batch(job: "Job", world_size: int) -> "Job":
    """Return the job with `train.batch_size` in place of `train.batch_size_per_rank`.

    The batch is fixed here, once: an attempt on other numbers of ranks must continue with the same batch.

    Raises:
        RefusedError: if the job cannot be split over so many ranks.
    """
    settings = job.settings
    if not isinstance(settings, TrainSettings) or settings.batch_size_per_rank is None:
        return job
    batch = settings.batch_size_per_rank * settings.split(world_size).data
    changes = {"batch_size": batch, "batch_size_per_rank": None}
    return job.model_copy(update={"settings": settings.model_copy(update=changes)})


def with_fixed_batch(loaded: "LoadedJob", job: "Job") -> "LoadedJob":
    """Return a loaded job whose text has the batch of `job`, as `fixed_batch` returned it."""
    if job is loaded.job or not isinstance(job.settings, TrainSettings):
        return loaded
    whole = loaded.document.mapping()
    section = {key: value for key, value in whole["train"].items() if key != "batch_size_per_rank"}
    text = yamlfile.dump({**whole, "train": {**section, "batch_size": job.settings.batch_size}})
    return replace(loaded, job=job, text=text)
