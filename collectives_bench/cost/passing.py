"""The buffers in which data-parallel modes send gradients and parameters, in bytes. Pure.

own modes          a copy to be put into a bucket, gradients in the communication dtype, stacks at rank 0
zero1, zero2       the shard of a bucket that is being summed; in zero2 also two buckets of gradients
zero3, fsdp        the current unit, the next one (prefetched), parameters outside all units, a unit's gradients
gloo               hidden memory of its calls, measured by `collectives_bench` as a share of S:
                   all_gather and gather 1.01, reduce_scatter 1.03, all_reduce 0.04; our rings: three columns
"""

from collections.abc import Callable
from typing import Final

from muster.collectives_bench.cost.buckets import OWN_ALONE, TORCH_BUCKET
from muster.collectives_bench.cost.load import RankLoad

HIDDEN: Final[dict[str, dict[str, float]]] = {
    "gloo": {"all_gather": 1.01, "gather": 1.01, "reduce_scatter": 1.03, "all_reduce": 0.04}
}
PREFETCHED: Final = 1  # number of units that are gathered before the current unit needs them
UNDER_WAY: Final = 2  # number of flat buckets being summed at the same time in ZeRO-2 and ZeRO-3
COLUMNS: Final = 3  # number of a ring's columns in transfer at the same time
COLUMN_BYTES: Final = 3 * 2**20  # the maximum


def passing(mode: str, load: RankLoad) -> float:
    """Return the bytes of a mode's buffers on the rank that needs the most. With exact sums, the gradients of each
    virtual shard are kept separately.

    The result is 0 if there are no gradients to average, as in a stage with only pooling layers.
    """
    if not load.gradient_sizes:
        return 0.0
    apart = (load.own_shards - 1) * sum(load.gradient_sizes) if mode not in ("single", "ddp", "fsdp") else 0
    return PASSED[mode](load) + apart if load.ranks > 1 else apart


def hidden(load: RankLoad, operation: str) -> float:
    """Return the hidden memory of a backend's call, as a share of the call's bytes."""
    return HIDDEN.get(load.backend, {}).get(operation, 0.0)


def _of_overlap(load: RankLoad) -> float:
    """Count one gradient that is being copied into its view, and two gradients that are being sent."""
    whole, largest = sum(load.gradient_sizes), max(load.gradient_sizes)
    return _copied(load, largest) + whole * _message(load) + 2 * largest * hidden(load, "all_reduce")


def _of_buckets(load: RankLoad) -> float:
    """Count the gradients that are being copied into a bucket, and two buckets that are being sent."""
    whole, largest = sum(load.gradient_sizes), max(load.gradient_sizes)
    coming = _copied(load, max(largest, _bucket(load)))
    return coming + whole * _message(load) + 2 * hidden(load, "all_reduce") * _bucket(load)


def _copied(load: RankLoad, together: int) -> float:
    """Return the bytes that exist twice during a copy.

    On GPUs they are 0, or `together` if gradients change their dtype. On CPUs, one gradient is copied at a time, and
    gradients of 4 MB or more are sent without a copy.
    """
    if load.backend == "nccl":
        return together if _message(load) else 0.0
    return max((size for size in load.gradient_sizes if size < OWN_ALONE), default=0)


def _message(load: RankLoad) -> float:
    """Return the size of the gradients' copy in the communication dtype, as a share of the gradients' size."""
    return 0.0 if load.sent in (None, load.recipe.gradient) else load.sent / load.recipe.gradient


def _bucket(load: RankLoad) -> int:
    """Return the bytes of the largest bucket. A gradient above the cap has its own bucket."""
    whole = sum(load.gradient_sizes)
    return whole if load.bucket_bytes is None else min(max(load.bucket_bytes, max(load.gradient_sizes)), whole)


def _ring(load: RankLoad, nbytes: float) -> float:
    """Return the bytes of the buffers of Muster's ring for a message; 0 with NCCL, which needs no further buffer."""
    return 0.0 if load.backend == "nccl" else COLUMNS * min(nbytes / load.ranks, COLUMN_BYTES)


def _of_zero2(load: RankLoad) -> float:
    """Count the gradients from autograd, and the flat buckets in which they are sent."""
    bucket, whole = _bucket(load), sum(load.gradient_sizes)
    made = whole if _adds_whole(load) else bucket
    return made + min(UNDER_WAY * bucket, whole) + _ring(load, bucket)


def _adds_whole(load: RankLoad) -> bool:
    """Return True if the gradients of several backwards are summed in full before they are sharded."""
    return load.adds_up and load.accumulate == "local"


def _units(load: RankLoad) -> tuple[int, list[int]]:
    """Return the number of elements outside all units, and the number in each unit, largest first."""
    sizes = [sum(t.elements for part in unit for t in part.tensors) for unit in load.model.units()]
    around = sizes.pop(0) if load.model.blocks else 0
    return around, sorted(sizes, reverse=True)


def _gathered(load: RankLoad) -> float:
    """Count gathered parameters: those outside all units, the current unit, and the prefetched one.

    If units are not freed after the forward, all parameters are in memory when the backward begins.
    """
    around, units = _units(load)
    elements = around + sum(units[: 1 + PREFETCHED]) if load.reshard else load.model.elements
    return elements * load.recipe.parameter


def _of_zero3(load: RankLoad) -> float:
    """Count gathered units, the gradients of one unit, and the flat gradients that are being sent."""
    around, units = _units(load)
    largest = [each * load.recipe.gradient for each in sorted((around, *units), reverse=True)]
    made = sum(load.gradient_sizes) if _adds_whole(load) else largest[0]
    return _gathered(load) + made + sum(largest[:UNDER_WAY]) + _ring(load, largest[0])


def _of_fsdp(load: RankLoad) -> float:
    """Count gathered units, the gradients of one unit, and the hidden memory of the backend's collectives."""
    around, units = _units(load)
    largest = max(around, units[0])
    made = sum(load.gradient_sizes) if _adds_whole(load) else largest * load.recipe.gradient
    unseen = max(
        hidden(load, "all_gather") * load.recipe.parameter, hidden(load, "reduce_scatter") * load.recipe.gradient
    )
    return _gathered(load) + made + largest * unseen


PASSED: Final[dict[str, Callable[[RankLoad], float]]] = {
    "single": lambda load: 0.0,
    # On rank 0: the stacked gradient, the gathered gradients, the mean and the result.
    "gather_scatter": lambda load: max(load.gradient_sizes) * (3 + load.ranks * (1 + hidden(load, "gather"))),
    # The hidden memory for the largest gradient, and its copy in another dtype.
    "allreduce": lambda load: (hidden(load, "all_reduce") + _message(load)) * max(load.gradient_sizes),
    # The flat tensor into which gradients are copied after the backward.
    "flat": lambda load: sum(load.gradient_sizes) * (1 + _message(load) + hidden(load, "all_reduce")),
    "overlap": _of_overlap,
    "bucketed": _of_buckets,
    # Two buckets that are being sent. Gradients are views of them.
    "ddp": lambda load: 2 * hidden(load, "all_reduce") * min(TORCH_BUCKET, sum(load.gradient_sizes)),
    # The gradient being copied into its bucket, buckets in the communication dtype, and a ring's buffers for a bucket.
    "zero1": lambda load: _copied(load, 0) + sum(load.gradient_sizes) * _message(load) + _ring(load, _bucket(load)),
    "zero2": _of_zero2,
    "zero3": _of_zero3,
    "fsdp": _of_fsdp,
}
