"""Expand a mode or `parallel:` for a number of ranks, and refuse splits that do not fit that number."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import replaced
from muster.jobs.basics.words import counted
from muster.jobs.models.model_shape import context_of, resolve_shape
from muster.jobs.models.shapes import GPT_SHAPES, POOL, VGG_SHAPES, GptShape
from muster.jobs.spec.modes import MODES, Parallel
from muster.pipe.schedules.cuts import by_hand
from muster.pipe.schedules.tables import SCHEDULES

if TYPE_CHECKING:
    from muster.jobs.spec.split import ParallelSettings
    from muster.jobs.spec.train_fields import ModelSettings, TrainFields

T = TypeVar("T", bound="TrainFields")

# Default number of micro-batches per rank of a pipeline. With 4 ranks, 1f1b then idles 3 / 19 of the time.
FILL: Final = 4


def split_of(settings: "TrainFields", world_size: int) -> Parallel:
    """Return the split that the mode or `parallel:` gives for a world size.

    Raises:
        RefusedError: if the split does not fit the world size.
    """
    given, parallel = settings.parallel, _unfilled(settings, world_size)
    if given is not None and parallel.world_size != world_size:
        factors = " x ".join(f"{name} {size}" for name, size in _degrees(given) if size > 1 or name == "data")
        raise RefusedError(
            f"train.parallel: {factors} makes {counted(parallel.world_size, 'rank')}, "
            f"but the job has {world_size}; set nodes and ranks_per_node to match"
        )
    return _filled(settings, parallel)


def microbatches_of(settings: "TrainFields", world_size: int) -> int:
    """Return the number of micro-batches of a pipeline on that many ranks; with `parallel:`, on its own ranks."""
    return _filled(settings, _unfilled(settings, world_size)).microbatches


def given_microbatches(settings: "TrainFields") -> int | None:
    """Return the number of micro-batches that the job sets, or None if the default applies."""
    return (settings.parallel and settings.parallel.microbatches) or settings.microbatches


def with_copies(settings: T, world_size: int) -> T:
    """Return settings with `parallel:` for as many copies of the model as a number of ranks can have.

    A mode fits any number. Settings that do not fit any number of copies are returned unchanged.
    """
    if (given := settings.parallel) is None:
        return settings
    copies, left = divmod(world_size, given.pipe * given.tensor)
    return settings if left or not copies else replaced(settings, parallel=replaced(given, data=copies))


def _unfilled(settings: "TrainFields", world_size: int) -> Parallel:
    given = settings.parallel
    if given is None:
        return MODES[settings.mode].expand(world_size)
    return Parallel(given.data, given.pipe, given.tensor, given.zero, given.sync, given.schedule or "")


def _degrees(given: "ParallelSettings") -> Sequence[tuple[str, int]]:
    return (("data", given.data), ("pipe", given.pipe), ("tensor", given.tensor))


def _filled(settings: "TrainFields", parallel: Parallel) -> Parallel:
    """Set the number of micro-batches per batch and the number of model slices (chunks) per rank of a pipeline."""
    if not parallel.schedule:
        return parallel
    few = parallel.schedule in ("model", "terapipe")  # terapipe keeps its ranks busy with slices instead
    default = 1 if few else max(1, min(FILL * parallel.pipe, settings.batch_size // parallel.data))
    microbatches = 1 if parallel.schedule == "model" else given_microbatches(settings) or default
    return replace(parallel, microbatches=microbatches, chunks=SCHEDULES[parallel.schedule].stages(1, settings.chunks))


def split_text(settings: "TrainFields") -> str:
    """Return the name of the mode, or a text for the split given by `parallel:`."""
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


def check_pipeline(settings: "TrainFields", parallel: Parallel) -> None:
    """Refuse an impossible pipeline before any rank is started.

    Raises:
        RefusedError: if there are fewer layers than stages, if `cut` does not match the number of stages, or if the
            batch is too small.
    """
    assert parallel.schedule
    made = settings.model.make is not None  # only the ranks know the layers of a user's model
    layers, stages = [] if made else layer_names(settings.model), parallel.pipe * parallel.chunks
    if not made and stages > len(layers):
        slices = f" of {parallel.chunks} stages each" if parallel.chunks > 1 else ""
        key = f"mode: {settings.mode}" if settings.parallel is None else f"parallel: {parallel.schedule}"
        raise RefusedError(
            f"train.{key}: {counted(parallel.pipe, 'rank')}{slices} make {stages} stages, but the model has "
            f"{counted(len(layers), 'layer')}; use {_fewer_stages(parallel, len(layers))}, or a deeper model"
        )
    if not made and not isinstance(settings.cut, str):
        try:
            by_hand(first_layers(settings.cut, layers), len(layers), stages)
        except ValueError as error:
            raise RefusedError(f"train.cut: {error}") from error
    tokens = None if settings.parallel is None else settings.parallel.tokens
    if (
        tokens is not None
        and parallel.schedule == "terapipe"
        and sum(tokens) != (context := context_of(settings.model))
    ):
        raise RefusedError(
            f"train.parallel.tokens: {', '.join(map(str, tokens))} add up to {sum(tokens)}, but a sequence has "
            f"{context} tokens (model.context); change the lengths, or remove tokens"
        )
    if settings.batch_size < parallel.data:
        raise RefusedError(
            f"train.batch_size: {settings.batch_size} is less than one sample for each of {parallel.data} pipelines; "
            f"use at least {parallel.data}"
        )
    shard = settings.batch_size // parallel.data
    if parallel.microbatches > max(shard, 1):
        each = f" for each of {parallel.data} pipelines" if parallel.data > 1 else ""
        raise RefusedError(
            f"train.microbatches: a batch of {settings.batch_size} has too few samples for "
            f"{parallel.microbatches} micro-batches{each}; use at most {shard}"
        )


def _fewer_stages(parallel: Parallel, layers: int) -> str:
    """Suggest a number of ranks, or of chunks per rank, for which the model has enough layers."""
    ranks, chunks = layers // parallel.chunks, layers // parallel.pipe
    ways = [f"at most {counted(ranks, 'rank')}"] if ranks else []
    if parallel.schedule == "interleaved" and chunks > 1:
        ways.append(f"at most {chunks} chunks")
    return " or ".join(ways) or f"fewer ranks and chunks, for at most {layers} stages"


def check_batch(settings: "TrainFields", parallel: Parallel, shards: int) -> None:
    """Refuse a batch that cannot be divided among the virtual ranks, `shards` in number.

    Raises:
        RefusedError: if the number of virtual ranks is not a multiple of the number of ranks, or the batch is too
            small.
    """
    if shards % parallel.data:
        raise RefusedError(
            f"train.virtual_ranks: {counted(shards, 'virtual rank')} cannot be divided evenly among {parallel.data} "
            f"ranks; set virtual_ranks to a multiple of {parallel.data}"
        )
    parts = settings.grad_accumulation
    if settings.batch_size < shards * parts:
        kind = "data-parallel rank" if parallel.tensor > 1 else "rank"
        raise RefusedError(
            f"train.batch_size: {settings.batch_size} is less than one sample for each of {counted(shards, kind)}"
            + (f" x {parts} accumulation steps" if parts > 1 else "")
            + f"; use at least {shards * parts}"
        )


def first_layers(cut: Sequence[int | str], layers: Sequence[str]) -> list[int]:
    """Convert a hand-written list of layer numbers and names to numbers.

    Raises:
        ValueError: if a name is not a layer of the model.
    """
    for name in cut:
        if isinstance(name, str) and name not in layers:
            raise ValueError(f"there is no layer {name!r}; the model has {', '.join(layers)}")
    return [each if isinstance(each, int) else layers.index(each) for each in cut]


def layer_names(model: "ModelSettings") -> list[str]:
    """List the layers of a built-in model, named as in `jobs/train/models`. Stages begin between them."""
    if model.name in VGG_SHAPES:
        names, convolutions, pools = list[str](), 0, 0
        for width in VGG_SHAPES[model.name].layers:
            if width == POOL:
                pools += 1
                names.append(f"pool{pools}")
            else:
                convolutions += 1
                names += [f"{kind}{convolutions}" for kind in ("conv", "norm", "relu")]
        shape = VGG_SHAPES[model.name]
        names += ["resize", "flatten"] if shape.side > 1 else ["flatten"]
        for number, (name, _, _) in enumerate(shape.linear, convolutions + 1):
            names += [name] if name == "head" else [name, f"relu{number}"]
        return names
    blocks = GPT_SHAPES[model.name].layers if model.name is not None else model.layers
    assert blocks is not None
    return ["embed", *(f"block{number}" for number in range(1, blocks + 1)), "norm", "head"]


def check_tensor(settings: "TrainFields", parallel: Parallel) -> None:
    """Refuse a model whose layers cannot be split over this many tensor ranks, before any rank is started.

    Raises:
        RefusedError: if heads, d_ff, vocabulary or context is not a multiple of the number of tensor ranks; the message
            lists degrees that fit.
    """
    if settings.model.make is not None:  # only the ranks know the layers of a user's model
        return
    shape = resolve_shape(settings.model, settings.model.vocabulary or GptShape.vocabulary)
    assert isinstance(shape, GptShape)
    sizes = {"heads": shape.heads, "d_ff": shape.d_ff, "vocabulary": shape.vocabulary}
    if settings.sequence_parallel:
        sizes["context"] = shape.context
    ranks = parallel.tensor
    wrong = [f"{what} {size} (remainder {size % ranks})" for what, size in sizes.items() if size % ranks]
    if not wrong:
        return
    common = math.gcd(*sizes.values())
    degrees = [str(each) for each in range(2, common + 1) if common % each == 0]
    where = "train.mode: tensor" if settings.parallel is None else f"train.parallel: tensor {ranks}"
    could = f"use {' or '.join(degrees)} ranks, which divide" if degrees else "no number of ranks divides"
    raise RefusedError(
        f"{where}: {ranks} ranks do not divide {', '.join(wrong)}; "
        f"{could} {', '.join(f'{what} {size}' for what, size in sizes.items())}"
    )
