"""The input of predictions: a job, the memory and computation it needs per rank, and the memory limit of a rank."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.jobs.basics.errors import RefusedError, UsageError
from muster.launch.bench.source import quantity

if TYPE_CHECKING:
    from muster.collectives_bench.cost.load import RankLoad, Recipe
    from muster.jobs.models.anatomy import Anatomy
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.bench.counting import OwnCode

MICROBATCHES: Final = 8  # default number of micro-batches of a pipeline
UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def train_job(path: str, overrides: Sequence[str]) -> "Job":
    """Load a `train:` job.

    Raises:
        JobFileError: if the file is invalid.
        RefusedError: if the job does not train.
    """
    from muster.jobs.spec.load import load_job
    from muster.launch.common.kinds import KINDS

    job = load_job(Path(path), KINDS, list(overrides), allow_unread=True).job  # other modes may read these keys
    if job.kind != "train":
        raise RefusedError(f"{path}: is a {job.kind}: job; only the steps of a train: job can be predicted")
    return job


def ranks_of(job: "Job", path: str, option: str) -> int:
    """Return the number of a job's ranks.

    Raises:
        UsageError: if the number of ranks depends on the hosts. The message names the `option` that sets it.
    """
    if not isinstance(job.ranks_per_node, int):
        raise UsageError(f"{path}: ranks_per_node: {job.ranks_per_node} depends on the hosts; give {option}")
    return job.nodes * job.ranks_per_node


def load_of(
    job: "Job", *, ranks: int, backend: str, microbatches: int | None = None, own: "OwnCode | None" = None
) -> "RankLoad":
    """Return the memory and the computation that a job needs per rank.

    `microbatches` of a pipeline defaults to the job's number. `own` is the user's model, counted by `counting.py`.

    Raises:
        RefusedError: if the job's model comes from user code and `own` does not have it.
    """
    from muster.collectives_bench.cost.load import SIZES, RankLoad
    from muster.jobs.spec.expand import FILL, given_microbatches
    from muster.jobs.spec.filled import fixed
    from muster.jobs.spec.train import TrainSettings

    settings = fixed(job, ranks).settings
    assert isinstance(settings, TrainSettings)
    if microbatches is None:
        microbatches = given_microbatches(settings) or (FILL * ranks if settings.is_pipeline else MICROBATCHES)
    if microbatches < 1:
        raise UsageError(f"--microbatches {microbatches}: must be 1 or more")
    sent_as, bucket_mb = settings.communication_dtype, settings.bucket_size_mb
    return RankLoad(
        model=_anatomy(settings, own),
        recipe=_recipe(settings, own),
        ranks=ranks,
        batch=settings.batch_size,
        microbatches=min(microbatches, settings.batch_size),  # each has at least one sample
        itemsize=SIZES[settings.precision].activation,
        backend=backend,
        bucket_bytes=None if bucket_mb is None else int(bucket_mb * 2**20),
        sent=None if sent_as is None else SIZES[sent_as].activation,
        shards=settings.virtual_world_size(ranks) if settings.exact else None,
        accumulation=settings.grad_accumulation,
        accumulate=settings.accumulate,
        reshard=settings.reshard_after_forward,
        recompute=settings.activation_checkpointing,
        sequence=settings.sequence_parallel,
    )


def _anatomy(settings: "TrainSettings", own: "OwnCode | None") -> "Anatomy":
    from muster.jobs.models.anatomy import anatomy
    from muster.jobs.models.model_shape import resolve_shape
    from muster.jobs.models.shapes import GptShape, VggShape

    if own is not None and own.model is not None:
        return own.model.model
    vocabulary = VggShape.classes if settings.model.is_vgg else GptShape.vocabulary
    return anatomy(resolve_shape(settings.model, settings.model.vocabulary or vocabulary))


def _recipe(settings: "TrainSettings", own: "OwnCode | None") -> "Recipe":
    from muster.collectives_bench.cost.load import Recipe

    optimizer = settings.optimizer
    recipe = Recipe.of(optimizer.name, momentum=optimizer.momentum > 0, precision=settings.precision)
    if own is None or own.state_bytes is None:
        return recipe
    wider = 2 if settings.precision == "fp64" else 1  # the state was counted in float32
    return replace(recipe, optimizer=own.state_bytes * wider + recipe.master)


def memory_limit(text: str | None) -> float | None:
    """Return the limit in bytes, or None if there is none. Errors as for `quantity`."""
    return None if text is None else quantity("--memory", text, _MEMORY, UNITS, "a size such as 80G or 512M")
