"""The time for which a step waits for the network, with one function per mode in `modes.WAYS`. Pure.

Each function gets the load, the compute times and the exchanges' times, and returns the seconds of communication that
no computation hides. Exchanges without a pause between them are requested as `back_to_back`, for two reasons: a shaped
link sends the first bytes after a pause immediately, and a gather begins while the scatter before it is still running.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Final, Literal, Protocol

from muster.collectives_bench.cost.buckets import (
    OWN_ALONE,
    TORCH_BUCKET,
    Lanes,
    PredictedBucket,
    as_ours,
    as_torch,
    at_most,
    finish_s,
    gradients_of,
    overlapped,
    registered,
)
from muster.collectives_bench.cost.load import RankLoad
from muster.collectives_bench.cost.messages import GATHER, SCATTER, SUM, between_layers, kept_units
from muster.collectives_bench.cost.modes import WAYS, TurnOrder, cut, messages
from muster.jobs.basics.errors import RefusedError

if TYPE_CHECKING:
    from muster.collectives_bench.cost.predicting import Prediction

COPY_BYTES_S: Final = (
    4e9  # bytes/s at which a rank reads or writes gradients: 3.75 GB/s for four ranks on two cores, 8.6 for one
)
FRESH_S_PER_BYTE: Final = 0.42e-9  # seconds per byte for page faults of memory that is used for the first time
REDUCE_SCATTERS: Final = ("reduce_scatter", "ring_reduce_scatter", "exchange_reduce_scatter")
ALL_GATHERS: Final = ("all_gather", "ring_all_gather")
OPERATIONS: Final = {
    SUM: (SUM,),
    GATHER: ALL_GATHERS,
    SCATTER: REDUCE_SCATTERS,
}  # equivalent ones, as a bench names them

Bound = Literal["low_s", "seconds", "high_s"]


@dataclass(frozen=True)
class Compute:
    """Seconds that one rank needs to compute its part of the batch.

    In mode single, the time is `ranks` times as long.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0


NO_COMPUTE: Final = Compute(0.0, 0.0)


class Network(Protocol):
    """A source of the times of exchanges: a profile, or one derived from it."""

    def predict(
        self, operation: str, nbytes: float, *, ranks: int, nodes: int, backend: str | None, back_to_back: bool
    ) -> "Prediction":
        """Predict an exchange."""


class Times:
    """Predicted times of exchanges in a world: the low end, the middle or the high end of their intervals."""

    def __init__(
        self, network: "Network", load: RankLoad, nodes: int, bound: Bound, lanes: Lanes | None = None
    ) -> None:
        self.load = load
        self.lanes = lanes or Lanes.of(load.backend)

        @cache
        def ask(operation: str, nbytes: int, ranks: int, back_to_back: bool) -> float:
            spread = min(nodes, ranks)
            answer = network.predict(
                operation, nbytes, ranks=ranks, nodes=spread, backend=load.backend, back_to_back=back_to_back
            )
            return float(getattr(answer, bound))

        self._ask = ask

    def of(self, operation: str, nbytes: int, *, ranks: int | None = None, back_to_back: bool = False) -> float:
        """Return the seconds of an operation among all ranks, or among `ranks` of them."""
        return self._ask(operation, nbytes, ranks or self.load.ranks, back_to_back)

    def best(self, operations: Sequence[str], nbytes: int) -> float:
        """Return the seconds of the fastest of several equivalent operations. Operations that the profile lacks are
        skipped.

        Raises:
            RefusedError: if the profile has none of the operations.
        """
        times, unknown = [], list[RefusedError]()
        for operation in operations:
            try:
                times.append(self.of(operation, nbytes))
            except RefusedError as error:
                unknown.append(error)
        if not times:
            raise unknown[0]
        return min(times)

    def reduced(self, buckets: Sequence[PredictedBucket]) -> float:
        """Return the seconds from the beginning of the backward until the all-reduces of all buckets have ended."""
        return finish_s(buckets, self.of_mode("bucketed"), self.lanes)

    def of_mode(self, name: str) -> Callable[[int], float]:
        """Return the function from a bucket's bytes to the seconds of its exchange in a mode."""
        if WAYS[name].zero:
            return lambda nbytes: self.best(REDUCE_SCATTERS, nbytes)
        return lambda nbytes: self.of("all_reduce", nbytes, back_to_back=True)


Exposed = Callable[[RankLoad, Compute, Times], float]


def _gradients(load: RankLoad, compute: Compute) -> list[PredictedBucket]:
    return gradients_of(load.model, load.recipe.gradient, compute.backward_s)


def _sent(load: RankLoad, compute: Compute) -> list[PredictedBucket]:
    """Return gradients as Muster's wrappers send them: in reverse order of registration, in the communication dtype."""
    return registered(load.model, load.sent or load.recipe.gradient, compute.backward_s)


def _two_passes_s(load: RankLoad, gradients: Sequence[PredictedBucket]) -> float:
    """Return the seconds needed to read or write all gradients twice. On a GPU, the result is nearly 0."""
    if load.backend == "nccl" or load.ranks == 1:
        return 0.0
    return 2 * sum(each.nbytes for each in gradients) / COPY_BYTES_S


def _gather_scatter(load: RankLoad, compute: Compute, times: Times) -> float:
    """Return the seconds to gather, average and scatter every gradient. Rank 0's link passes (n - 1) S bytes each way.

    Rank 0 also allocates new memory for each gradient: n gathered tensors, the stacked one, the sum and the mean. On
    simulated nodes, these allocations took 0.10 s of 2.1 s for VGG-11 at 1 Gbit/s.
    """
    sizes = [each.nbytes for each in _sent(load, compute)]
    exchanges = sum(times.of("gather_scatter", nbytes, back_to_back=True) for nbytes in sizes)
    fresh = 0 if load.backend == "nccl" or load.ranks == 1 else load.ranks + 3
    return exchanges + fresh * sum(sizes) * FRESH_S_PER_BYTE


def _allreduce(load: RankLoad, compute: Compute, times: Times) -> float:
    """Return the seconds to all-reduce every gradient and divide it by the number of ranks."""
    gradients = _sent(load, compute)
    sums = sum(times.of("all_reduce", each.nbytes, back_to_back=True) for each in gradients)
    return sums + _two_passes_s(load, gradients)


def _flat(load: RankLoad, compute: Compute, times: Times) -> float:
    """Return the seconds to divide all gradients, copy them into a buffer and all-reduce it, without copying back."""
    gradients = _sent(load, compute)
    return times.of("all_reduce", sum(each.nbytes for each in gradients)) + _two_passes_s(load, gradients)


def _after_backward(end_s: float, compute: Compute) -> float:
    return max(end_s - compute.backward_s, 0.0)


def own_buckets(load: RankLoad) -> Callable[[Sequence[PredictedBucket], int | None], list[PredictedBucket]]:
    """Return the function that fills the buckets of Muster's own wrappers.

    On GPUs, large gradients are not sent alone.
    """
    return partial(as_ours, alone=None if load.backend == "nccl" else OWN_ALONE)


def _bucketed(load: RankLoad, compute: Compute, cap: int | None) -> list[PredictedBucket]:
    """Fill buckets by the gradients' own bytes; they are sent in the communication dtype."""
    made = own_buckets(load)(registered(load.model, load.recipe.gradient, compute.backward_s), cap)
    return [PredictedBucket(load.sent_bytes(each.nbytes), each.ready_s) for each in made]


BUCKETS: Final[dict[str, Callable[[RankLoad, Compute], list[PredictedBucket]]]] = {  # sent during the backward
    "overlap": lambda load, compute: _bucketed(load, compute, 0),
    "bucketed": lambda load, compute: _bucketed(load, compute, load.bucket_bytes),
    "ddp": lambda load, compute: as_torch(_gradients(load, compute)),
    **dict.fromkeys(
        ("zero1", "zero2"),
        lambda load, compute: at_most(_gradients(load, compute), load.bucket_bytes or TORCH_BUCKET),
    ),
}


def _during(name: str) -> "Exposed":
    return lambda load, compute, times: _after_backward(times.reduced(BUCKETS[name](load, compute)), compute)


def slowing_s(name: str, load: RankLoad, compute: Compute, times: Times) -> float:
    """Return how much longer a mode's backward takes because collectives run beside it. It is part of the exposed time.

    Raises:
        RefusedError: if an operation of the mode is unknown.
    """
    if name not in BUCKETS or load.ranks == 1:
        return 0.0
    found = overlapped(BUCKETS[name](load, compute), compute.backward_s, times.of_mode(name), times.lanes)
    return found.backward_s - compute.backward_s


def _zero12(load: RankLoad, compute: Compute, times: Times) -> float:
    """Reduce-scatter buckets during the backward, then all-gather the new parameters after the optimizer."""
    buckets = BUCKETS["zero1"](load, compute)
    end_s = finish_s(buckets, times.of_mode("zero1"), times.lanes)
    share = load.recipe.parameter / load.recipe.gradient
    gathers = sum(times.best(ALL_GATHERS, round(bucket.nbytes * share)) for bucket in buckets)
    return _after_backward(end_s, compute) + gathers


def _sharded(
    load: RankLoad,
    compute: Compute,
    times: Times,
    all_gathers: Sequence[str],
    reduce_scatters: Sequence[str],
    last: bool,
) -> float:
    """Simulate forwards and backwards: each unit is gathered one unit ahead, and its gradients are reduce-scattered.

    forward    gather 1  gather 2  gather 3          one exchange at a time, in this order
                         unit 1    unit 2  unit 3

    `last`: the backward keeps the last unit of the forward.
    """
    units, passes = load.model.units(), load.accumulation
    sizes = [sum(tensor.elements for part in unit for tensor in part.tensors) for unit in units]
    forward = _shares([sum(part.flops for part in unit) for unit in units], compute.forward_s / passes)
    flops = [sum(part.backward_flops for part in unit) for unit in units]  # 0 if `flops` includes the backward
    flops = flops if any(flops) else [sum(part.flops for part in unit) for unit in units]
    backward = _shares(flops, compute.backward_s / passes)
    kept = kept_units(load, len(units), keeps_last=last)
    now = link = 0.0

    def gathered(unit: int) -> float:
        return max(link, now) + times.best(all_gathers, sizes[unit] * load.recipe.parameter)

    for micro in range(passes):
        link = there = gathered(0)
        for unit, seconds in enumerate(forward):
            now = max(now, there)
            if unit + 1 < len(units):
                link = there = gathered(unit + 1)
            now += seconds
        there = now
        if not kept[-1]:
            link = there = gathered(len(units) - 1)
        for unit in reversed(range(len(units))):
            now = max(now, there)
            if unit and not kept[unit - 1]:
                link = there = gathered(unit - 1)
            now += backward[unit]
            if micro == passes - 1 or load.accumulate == "sharded":
                link = max(link, now) + times.best(reduce_scatters, sizes[unit] * load.recipe.gradient)
    return max(max(now, link) - compute.forward_s - compute.backward_s, 0.0)


def _shares(work: Sequence[int], seconds: float) -> list[float]:
    total = sum(work)
    return [seconds * each / total if total else seconds / len(work) for each in work]


def _pipe(schedule: TurnOrder) -> Exposed:
    """Count the messages while a pipeline fills and drains, and any message time beyond a micro-batch's computation."""

    def exposed(load: RankLoad, compute: Compute, times: Times) -> float:
        stages = cut(load.model, schedule, load.ranks)
        assert stages is not None
        count = load.microbatches if schedule.splits_batch else 1
        micro = -(-load.batch // count)
        sizes = [micro * each * load.itemsize for each in messages(stages, schedule)]
        sent = [times.of("ping_pong", nbytes, ranks=2) for nbytes in sizes]
        turn = (compute.forward_s + compute.backward_s) / 2 / count / schedule.chunks  # a chunk, one direction
        steady = max(max(sent, default=0.0) - turn, 0.0) * (count * schedule.chunks - 1)
        return 2 * (sum(sent) + steady)

    return exposed


def _tensor(load: RankLoad, compute: Compute, times: Times) -> float:
    """Sum all exchanges between split layers, which no computation hides."""
    exchanges = between_layers(load, load.batch / load.accumulation) * load.accumulation
    return sum(times.best(OPERATIONS[operation], nbytes) for operation, nbytes in exchanges)


EXPOSED: Final[dict[str, Exposed]] = {
    "single": lambda load, compute, times: 0.0,
    "gather_scatter": _gather_scatter,
    "allreduce": _allreduce,
    "flat": _flat,
    **{name: _during(name) for name in ("overlap", "bucketed", "ddp")},
    "zero1": _zero12,
    "zero2": _zero12,
    "zero3": lambda load, compute, times: _sharded(load, compute, times, ALL_GATHERS, REDUCE_SCATTERS, True),
    "fsdp": lambda load, compute, times: _sharded(load, compute, times, ALL_GATHERS[:1], REDUCE_SCATTERS[:1], False),
    **{name: _pipe(way.schedule) for name, way in WAYS.items() if way.schedule is not None},
    "tensor": _tensor,
}
