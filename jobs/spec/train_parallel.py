"""`parallel:` of a `train:` section, how a split is expanded, and what of a section no pipeline can do yet, and why.

Ranks that average gradients are neighbours, those of one pipeline are not (`pipe/mesh.py`); with data: 2, pipe: 3

    rank          0  1     2  3     4  5
    stage         0  0     1  1     2  2
    data rank     0  1     0  1     0  1       reads its own half of the batch
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import counted
from muster.jobs.models.shapes import GPT_SHAPES, POOL, VGG_SHAPES
from muster.jobs.spec.modes import MODES, Parallel, PipelineName, Sync, Zero
from muster.jobs.spec.strict import Positive, Strict
from muster.jobs.spec.yamlfile import show
from muster.pipe.schedules.cuts import by_hand
from muster.pipe.schedules.tables import SCHEDULES

if TYPE_CHECKING:
    from muster.jobs.spec.train import ModelSettings, TrainSettings

FILL: Final = 4  # micro-batches for each rank of a pipeline, where nobody says how many: 1f1b is idle 3 / 19 of 4 ranks
UNDER_A_PIPELINE: Final = ("flat", "bucketed", "sharded")  # ways to average a pipeline's gradients


class ParallelSettings(Strict):
    """A split written out, for products that no mode names; they must make as many ranks as the job has."""

    data: Positive = 1
    pipe: Positive = 1
    tensor: Positive = Field(1, description="of a GPT: ranks that have a part of every layer each")
    zero: Zero = Field(0, description="ZeRO's stage, shared out by sync: sharded (its default) or fsdp (3)")
    sync: Sync = Field("ddp", description="how gradients are averaged; under a pipeline: bucketed or flat")
    schedule: PipelineName | None = Field(None, description="of a pipeline; default: 1f1b where pipe is above 1")
    microbatches: Annotated[int, Field(ge=1)] | None = Field(None, description="as train.microbatches")

    @field_validator("zero", mode="before")
    @classmethod
    def _is_a_number(cls, zero: Any) -> Any:
        if type(zero) in (bool, float):  # true and 1.0 are equal to 1, which is enough for a Literal
            raise ValueError(f"must be 0, 1, 2 or 3, got {show(zero)}")
        return zero

    @model_validator(mode="before")
    @classmethod
    def _shares_out(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        more: dict[str, Any] = {}
        if given.get("schedule") is None:  # null stands for the default, as of every key that may be null
            given = {key: value for key, value in given.items() if key != "schedule"}
            if given.get("pipe", 1) != 1:
                more["schedule"] = "1f1b"
        if "sync" not in given:
            if given.get("zero"):
                more["sync"] = "sharded"
            elif given.get("schedule", more.get("schedule")):
                more["sync"] = "none" if given.get("data", 1) == 1 else "bucketed"
            elif given.get("tensor", 1) != 1 and given.get("data", 1) == 1:
                more["sync"] = "none"
        return {**more, **({"zero": 3} if given.get("sync") == "fsdp" else {}), **given}

    @model_validator(mode="after")
    def _is_one_way(self) -> Self:
        stages = {"sharded": (1, 2, 3), "fsdp": (3,)}.get(self.sync, (0,))
        if self.zero not in stages:
            raise ValueError(
                f"zero: {self.zero} does not go with sync: {self.sync}; zero 1, 2 and 3 go with sharded, 3 with fsdp, "
                "0 with all others"
            )
        return self

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        if self.data > 1 and self.sync == "none":
            raise ValueError(f"sync: none leaves {self.data} data-parallel ranks with gradients of their own; set it")
        if self.schedule is None:
            if self.microbatches is not None:
                raise ValueError("microbatches are a pipeline's; set pipe and schedule, or use grad_accumulation")
            return self
        if self.zero > 2:
            asked = "sync: fsdp" if self.sync == "fsdp" else f"zero: {self.zero}"
            raise ValueError(
                f"{asked} does not go with a pipeline, whose micro-batches would each gather all "
                "parameters; zero 0, 1 and 2 do"
            )
        if self.data > 1 and self.sync not in UNDER_A_PIPELINE:
            raise ValueError(
                f"sync: {self.sync} does not go with a pipeline, whose gradients are whole after a stage's last "
                "backward; flat, bucketed and sharded do, or leave it out"
            )
        return self


def split_of(settings: "TrainSettings", world_size: int) -> Parallel:
    """Expand mode or `parallel:` for a world size.

    Raises:
        RefusedError: the split does not fit the world size.
    """
    given = settings.parallel
    if given is None:
        return _filled(settings, MODES[settings.mode].expand(world_size))
    parallel = Parallel(given.data, given.pipe, given.tensor, given.zero, given.sync, given.schedule or "")
    if parallel.world_size != world_size:
        factors = " x ".join(f"{name} {size}" for name, size in _degrees(given) if size > 1 or name == "data")
        raise RefusedError(
            f"train.parallel: {factors} makes {counted(parallel.world_size, 'rank')}, "
            f"the job has {world_size}; set nodes and ranks_per_node to match"
        )
    return _filled(settings, parallel)


def _degrees(given: ParallelSettings) -> Sequence[tuple[str, int]]:
    return (("data", given.data), ("pipe", given.pipe), ("tensor", given.tensor))


def _filled(settings: "TrainSettings", parallel: Parallel) -> Parallel:
    """Say into how many micro-batches a pipeline cuts its batch, and the model into how many slices a rank."""
    if not parallel.schedule:
        return parallel
    of_split = None if settings.parallel is None else settings.parallel.microbatches
    microbatches = (
        of_split or settings.microbatches or max(1, min(FILL * parallel.pipe, settings.batch_size // parallel.data))
    )
    microbatches = 1 if parallel.schedule == "model" else microbatches
    return replace(parallel, microbatches=microbatches, chunks=SCHEDULES[parallel.schedule].stages(1, settings.chunks))


def split_text(settings: "TrainSettings") -> str:
    """Name the mode, or the split that is written out."""
    given = settings.parallel
    if given is None:
        return settings.mode
    shared = f"data {given.data}" + (f", zero {given.zero}" if given.zero else "")
    if given.schedule:
        split = f" x tensor {given.tensor}" if given.tensor > 1 else ""
        return f"{shared} x pipe {given.pipe} by {given.schedule}{split}"
    if given.tensor > 1:
        return f"{shared}{f' by {given.sync}' if given.data > 1 else ''} x tensor {given.tensor}"
    return f"{shared} by {given.sync}"


def check_pipeline(settings: "TrainSettings", parallel: Parallel) -> None:
    """Refuse a pipeline that cannot be: before any rank is started.

    Raises:
        RefusedError: fewer layers than stages, cuts that make another number of stages, or too small a batch.
    """
    assert parallel.schedule
    layers, stages = layer_names(settings.model), parallel.pipe * parallel.chunks
    if stages > len(layers):
        slices = f" of {parallel.chunks} stages each" if parallel.chunks > 1 else ""
        key = f"mode: {settings.mode}" if settings.parallel is None else f"parallel: {parallel.schedule}"
        raise RefusedError(
            f"train.{key}: {counted(parallel.pipe, 'rank')}{slices} make {stages} stages, the model has "
            f"{counted(len(layers), 'layer')}; use {_fewer_stages(parallel, len(layers))}, or a deeper model"
        )
    if not isinstance(settings.cut, str):
        try:
            by_hand(first_layers(settings.cut, layers), len(layers), stages)
        except ValueError as error:
            raise RefusedError(f"train.cut: {error}") from error
    if settings.batch_size < parallel.data:
        raise RefusedError(
            f"train.batch_size: {settings.batch_size} is less than one sample for each of {parallel.data} pipelines; "
            f"use at least {parallel.data}"
        )
    shard = settings.batch_size // parallel.data
    if parallel.microbatches > max(shard, 1):
        each = f" for each of {parallel.data} pipelines" if parallel.data > 1 else ""
        raise RefusedError(
            f"train.microbatches: a batch of {settings.batch_size} has no sample for each of "
            f"{parallel.microbatches} micro-batches{each}; use at most {shard}"
        )


def _fewer_stages(parallel: Parallel, layers: int) -> str:
    """Say how many ranks, or slices a rank, so many layers are enough for."""
    ranks, chunks = layers // parallel.chunks, layers // parallel.pipe
    ways = [f"at most {counted(ranks, 'rank')}"] if ranks else []
    if parallel.schedule == "interleaved" and chunks > 1:
        ways.append(f"at most {chunks} chunks")
    return " or ".join(ways) or f"fewer ranks and chunks, which make at most {layers} stages"


def check_batch(settings: "TrainSettings", parallel: Parallel) -> None:
    """Refuse batches that cannot be dealt to virtual ranks.

    Raises:
        RefusedError: virtual ranks that the ranks do not divide, or too small a batch.
    """
    shards = settings.virtual_world_size(parallel.world_size)
    if shards % parallel.data:
        raise RefusedError(
            f"train.virtual_ranks: {counted(shards, 'virtual rank')} cannot be dealt evenly to {parallel.data} ranks; "
            f"set virtual_ranks to a multiple of {parallel.data}"
        )
    parts = settings.grad_accumulation
    if settings.batch_size < shards * parts:
        kind = "data-parallel rank" if settings.splits_layers else "rank"
        raise RefusedError(
            f"train.batch_size: {settings.batch_size} is less than one sample for each of {counted(shards, kind)}"
            + (f" x {parts} accumulation steps" if parts > 1 else "")
            + f"; use at least {shards * parts}"
        )


def first_layers(cut: Sequence[int | str], layers: Sequence[str]) -> list[int]:
    """Return the numbers of layers that a list written by hand names, or numbers.

    Raises:
        ValueError: there is no layer of a name.
    """
    for name in cut:
        if isinstance(name, str) and name not in layers:
            raise ValueError(f"there is no layer {name!r}; the model has {', '.join(layers)}")
    return [each if isinstance(each, int) else layers.index(each) for each in cut]


def layer_names(model: "ModelSettings") -> list[str]:
    """List a model's layers as `jobs/train/models` name them; stages are cut between them."""
    if model.name in VGG_SHAPES:
        names, convolutions, pools = list[str](), 0, 0
        for width in VGG_SHAPES[model.name].layers:
            if width == POOL:
                pools += 1
                names.append(f"pool{pools}")
            else:
                convolutions += 1
                names += [f"{kind}{convolutions}" for kind in ("conv", "norm", "relu")]
        return [*names, "flatten", "head"]
    blocks = GPT_SHAPES[model.name].layers if model.name is not None else model.layers
    assert blocks is not None
    return ["embed", *(f"block{number}" for number in range(1, blocks + 1)), "norm", "head"]


def why_not_pipelined(settings: "TrainSettings") -> str | None:
    """Return why these settings cannot be trained by a pipeline, and what to do; None when they can.

    A setting that a mode does not read is no reason: a run may go on in another mode.
    """
    if not settings.is_pipeline:
        return None
    mode = settings.mode_name
    if settings.grad_accumulation > 1:
        return (
            f"grad_accumulation: {settings.grad_accumulation} does not go with {mode}, which cuts a batch into "
            "microbatches and adds up their gradients; remove it, or set microbatches"
        )
    if (
        settings.microbatches is not None
        and settings.parallel is not None
        and settings.parallel.microbatches is not None
    ):
        return (
            f"microbatches: {settings.microbatches} and parallel.microbatches: {settings.parallel.microbatches} say "
            "one thing twice; remove one of them"
        )
    if settings.communication_dtype is not None:
        return f"{mode} sends activations and gradients as they are; remove communication_dtype"
    if settings.compile:
        return f"{mode} does not go with compile yet; set compile: false"
    if settings.layerwise and settings.activation_checkpointing:
        return "layerwise runs every layer by itself, without activation_checkpointing; set one of them to false"
    if settings.exact and settings.virtual_ranks not in (None, 1):
        return f"{mode} has one virtual rank, virtual_ranks is {settings.virtual_ranks}; leave it out"
    if settings.exact and settings.parallel is not None and settings.parallel.data > 1:
        return (
            f"exact: true does not go with {settings.parallel.data} data-parallel pipelines yet; "
            "set parallel.data: 1, or exact: false"
        )
    return None
