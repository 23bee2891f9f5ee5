"""A job's own combination of modes and its pipeline stages, converted to the terms of the cost model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from muster.jobs.basics.errors import RefusedError

if TYPE_CHECKING:
    from muster.collectives_bench.cost.load import RankLoad
    from muster.collectives_bench.cost.modes import Way
    from muster.jobs.models.anatomy import Anatomy
    from muster.jobs.spec.modes import Parallel
    from muster.jobs.spec.train import TrainSettings


def own_split(settings: "TrainSettings", load: "RankLoad") -> "tuple[Way, RankLoad]":
    """Return a job's mode, and `load` with the job's parallel degrees, micro-batches and stages.

    A pipeline that is cut by measured times is treated like one that is cut by operation counts.

    Raises:
        RefusedError: if the split does not fit the number of ranks, or the model.
    """
    from muster.collectives_bench.cost.load import Split
    from muster.collectives_bench.cost.modes import WAYS

    way = WAYS[settings.mode_name]
    parallel = settings.split(load.ranks)
    if way.family not in ("pipe", "tensor"):
        return way, load
    stages: Sequence[Sequence[str]] = ()
    if way.schedule is not None:
        way = replace(way, schedule=replace(way.schedule, chunks=parallel.chunks))
        stages = _stages(settings, load.model, parallel)
    split = Split(
        parallel.data, parallel.pipe, parallel.tensor, parallel.zero, parallel.sync, tuple(map(tuple, stages))
    )
    count = max(parallel.microbatches, 1)
    return way, replace(load, split=split, microbatches=count)


def at_world(settings: "TrainSettings", ranks: int) -> "TrainSettings":
    """Return `settings` with the data-parallel degree scaled to another number of ranks.

    Raises:
        RefusedError: if the pipe and tensor degrees do not divide the ranks.
    """
    from muster.jobs.spec.split import ParallelSettings

    given = settings.parallel
    assert given is not None
    if ranks % (given.pipe * given.tensor):
        raise RefusedError(f"pipe {given.pipe} x tensor {given.tensor} do not divide {ranks} ranks")
    degrees = given.model_dump(exclude={"sync"} if given.sync == "none" else None)
    scaled = ParallelSettings.model_validate({**degrees, "data": ranks // (given.pipe * given.tensor)})
    return settings.model_copy(update={"parallel": scaled})


def _stages(settings: "TrainSettings", model: "Anatomy", parallel: "Parallel") -> list[list[str]]:
    """Return the names of every stage's layers, cut as in `jobs/train/parallel/stages.py`."""
    from muster.jobs.models.anatomy import layer_weight
    from muster.jobs.spec.expand import first_layers, layer_names
    from muster.pipe.schedules.cuts import balanced_ranks, by_hand, lengths
    from muster.pipe.schedules.tables import SCHEDULES

    made = settings.model.make is not None
    names = [name for name, _ in model.layers()] if made else layer_names(settings.model)
    rank_of = SCHEDULES[parallel.schedule].rank_of(parallel.pipe, parallel.chunks)
    try:
        if isinstance(settings.cut, str):
            parts = dict(model.layers())
            cuts = balanced_ranks([layer_weight(settings.cut, parts.get(name, ())) for name in names], rank_of)
        else:
            cuts = by_hand(first_layers(settings.cut, names), len(names), len(rank_of))
    except ValueError as error:
        raise RefusedError(f"train.cut: {error}") from error
    return [names[begin : begin + length] for begin, length in zip(cuts, lengths(cuts, len(names)), strict=True)]
