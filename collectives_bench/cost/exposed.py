"""How long a step waits for the network in each mode: one function for each row of `modes.WAYS`. Pure.

Each takes the load, the compute times and the exchanges' times, and returns the seconds of communication that no
computing hides. Exchanges without a pause between them are requested as `back_to_back`: after a pause a shaped link
lets the first bytes pass immediately, and a gather begins while the scatter before it is still under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Final, Literal

from muster.collectives_bench.cost.buckets import (
    OWN_ALONE,
    TORCH_BUCKET,
    Bucket,
    Lanes,
    as_ours,
    as_torch,
    at_most,
    finish_s,
    gradients_of,
    registered,
)
from muster.collectives_bench.cost.load import Load
from muster.collectives_bench.cost.modes import WAYS, Schedule, cut, messages
from muster.jobs.basics.errors import RefusedError

if TYPE_CHECKING:
    from muster.collectives_bench.cost.profile import Profile

COPY_BYTES_S: Final = (
    4e9  # a rank's own passes over gradients: measured 3.75 GB/s for four ranks on two cores, 8.6 for one rank
)
FRESH_S_PER_BYTE: Final = 0.42e-9  # page faults of memory that is new to a process
REDUCE_SCATTERS: Final = ("reduce_scatter", "ring_reduce_scatter", "exchange_reduce_scatter")
ALL_GATHERS: Final = ("all_gather", "ring_all_gather")
BLOCK_ALL_REDUCES: Final = 4  # in a transformer block: after attention and MLP, in forward and backward

Bound = Literal["low_s", "seconds", "high_s"]


@dataclass(frozen=True)
class Compute:
    """Seconds that one rank computes on its part of the batch; mode single takes `ranks` times as long."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0


NO_COMPUTE: Final = Compute(0.0, 0.0)


class Times:
    """Times of exchanges in a world, at the low end, the middle or the high end of their intervals."""

    def __init__(self, network: "Profile", load: Load, nodes: int, bound: Bound) -> None:
        self.load = load

        @cache
        def ask(operation: str, nbytes: int, ranks: int, back_to_back: bool) -> float:
            spread = min(nodes, ranks)
            answer = network.predict(
                operation, nbytes, ranks=ranks, nodes=spread, backend=load.backend, back_to_back=back_to_back
            )
            return float(getattr(answer, bound))

        self._ask = ask

    def of(self, operation: str, nbytes: int, *, ranks: int | None = None, back_to_back: bool = False) -> float:
        """Return the seconds of an operation between all ranks, or between `ranks` of them."""
        return self._ask(operation, nbytes, ranks or self.load.ranks, back_to_back)

    def best(self, operations: Sequence[str], nbytes: int) -> float:
        """Return the seconds of the fastest of several equivalent operations; unknown ones are skipped.

        Raises:
            RefusedError: none is known.
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

    def reduced(self, buckets: Sequence[Bucket]) -> float:
        """Return when the all-reduces of all buckets have ended, in seconds from the beginning of the backward."""
        return finish_s(
            buckets, lambda nbytes: self.of("all_reduce", nbytes, back_to_back=True), Lanes.of(self.load.backend)
        )


Exposed = Callable[[Load, Compute, Times], float]


def _gradients(load: Load, compute: Compute) -> list[Bucket]:
    return gradients_of(load.model, load.recipe.gradient, compute.backward_s)


def _sent(load: Load, compute: Compute) -> list[Bucket]:
    """Return gradients as our own wrappers send them: in reverse order of registration, in the communication type."""
    return registered(load.model, load.sent or load.recipe.gradient, compute.backward_s)


def _pass_s(load: Load, gradients: Sequence[Bucket], passes: float) -> float:
    """Return the seconds of reading or writing all gradients `passes` times; on a GPU nearly 0."""
    if load.backend == "nccl" or load.ranks == 1:
        return 0.0
    return passes * sum(each.nbytes for each in gradients) / COPY_BYTES_S


def _gather_scatter(load: Load, compute: Compute, times: Times) -> float:
    """Sum gather, mean and scatter of every gradient: (n - 1) S pass the link of rank 0 in each direction.

    Rank 0 also takes new memory for each gradient: n gathered tensors, the stacked one, the sum and the mean. In the
    box that was 0.10 s of 2.1 s for VGG-11 at 1 Gbit/s.
    """
    sizes = [each.nbytes for each in _sent(load, compute)]
    exchanges = sum(times.of("gather_scatter", nbytes, back_to_back=True) for nbytes in sizes)
    fresh = 0 if load.backend == "nccl" or load.ranks == 1 else load.ranks + 3
    return exchanges + fresh * sum(sizes) * FRESH_S_PER_BYTE


def _allreduce(load: Load, compute: Compute, times: Times) -> float:
    """Sum an all-reduce of every gradient, and their division by the number of ranks."""
    gradients = _sent(load, compute)
    sums = sum(times.of("all_reduce", each.nbytes, back_to_back=True) for each in gradients)
    return sums + _pass_s(load, gradients, 2)


def _flat(load: Load, compute: Compute, times: Times) -> float:
    """Divide all gradients, copy them into one buffer, and all-reduce it; they are not copied back."""
    gradients = _sent(load, compute)
    return times.of("all_reduce", sum(each.nbytes for each in gradients)) + _pass_s(load, gradients, 2)


def _after_backward(end_s: float, compute: Compute) -> float:
    return max(end_s - compute.backward_s, 0.0)


def own_buckets(load: Load) -> Callable[[Sequence[Bucket], int | None], list[Bucket]]:
    """Return the function that fills our own wrappers' buckets; on GPUs no gradient is sent alone for its size."""
    return partial(as_ours, alone=None if load.backend == "nccl" else OWN_ALONE)


def _during(load: Load, compute: Compute, times: Times, cap: int | None) -> float:
    """Fill buckets by the gradients' own bytes, then send them in the communication type during the backward."""
    gradients = registered(load.model, load.recipe.gradient, compute.backward_s)
    made = own_buckets(load)(gradients, cap)
    sent = [Bucket(load.sent_bytes(each.nbytes), each.ready_s) for each in made]
    return _after_backward(times.reduced(sent), compute)


def _ddp(load: Load, compute: Compute, times: Times) -> float:
    return _after_backward(times.reduced(as_torch(_gradients(load, compute))), compute)


def _zero12(load: Load, compute: Compute, times: Times) -> float:
    """Reduce-scatter buckets during the backward; all-gather the new parameters after the optimizer."""
    buckets = at_most(_gradients(load, compute), load.bucket_bytes or TORCH_BUCKET)
    end_s = finish_s(buckets, lambda nbytes: times.best(REDUCE_SCATTERS, nbytes), Lanes.of(load.backend))
    share = load.recipe.parameter / load.recipe.gradient
    gathers = sum(times.best(ALL_GATHERS, round(bucket.nbytes * share)) for bucket in buckets)
    return _after_backward(end_s, compute) + gathers


def _sharded(
    load: Load, compute: Compute, times: Times, all_gathers: Sequence[str], reduce_scatters: Sequence[str]
) -> float:
    """Walk through the units in forward and backward: each is gathered one ahead, its gradients are reduce-scattered.

    forward    gather 1  gather 2  gather 3          one exchange at a time, in this order
                         unit 1    unit 2  unit 3
    """
    units = load.model.units()
    sizes = [sum(tensor.elements for part in unit for tensor in part.tensors) for unit in units]
    gathers = [times.best(all_gathers, size * load.recipe.parameter) for size in sizes]
    scatters = [times.best(reduce_scatters, size * load.recipe.gradient) for size in sizes]
    forward = _shares([sum(part.flops for part in unit) for unit in units], compute.forward_s)
    backward = _shares([sum(part.backward_flops for part in unit) for unit in units], compute.backward_s)
    count = len(units)
    now = link = there = gathers[0]  # the first unit is gathered, and the link is free
    for i in range(count):
        now = max(now, there)
        if i + 1 < count:
            link = there = max(link, now) + gathers[i + 1]
        now += forward[i]
    there = now  # the last unit was not freed
    for i in reversed(range(count)):
        now = max(now, there)
        if i > 0:
            link = there = max(link, now) + gathers[i - 1]
        now += backward[i]
        link = max(link, now) + scatters[i]
    return max(max(now, link) - compute.forward_s - compute.backward_s, 0.0)


def _shares(work: Sequence[int], seconds: float) -> list[float]:
    return [seconds * each / sum(work) for each in work]


def _pipe(schedule: Schedule) -> Exposed:
    """Return the cost of a pipeline's messages: those in the ramps, and any time that exceeds a micro-batch."""

    def exposed(load: Load, compute: Compute, times: Times) -> float:
        stages = cut(load.model, schedule, load.ranks)
        assert stages is not None
        count = load.microbatches if schedule.splits_batch else 1
        micro = -(-load.batch // count)
        sizes = [micro * each * load.itemsize for each in messages(stages, schedule)]
        sent = [times.of("ping_pong", nbytes, ranks=2) for nbytes in sizes]
        turn = (compute.forward_s + compute.backward_s) / 2 / count / schedule.chunks  # of a chunk, one direction
        steady = max(max(sent, default=0.0) - turn, 0.0) * (count * schedule.chunks - 1)
        return 2 * (sum(sent) + steady)

    return exposed


def _tensor(load: Load, compute: Compute, times: Times) -> float:
    """Count four all-reduces of the residual stream for each block; no computing hides them."""
    nbytes = load.batch * load.model.tokens * load.model.width * load.itemsize
    return BLOCK_ALL_REDUCES * load.model.blocks * times.of("all_reduce", nbytes)


EXPOSED: Final[dict[str, Exposed]] = {
    "single": lambda load, compute, times: 0.0,
    "gather_scatter": _gather_scatter,
    "allreduce": _allreduce,
    "flat": _flat,
    "overlap": lambda load, compute, times: _during(load, compute, times, 0),
    "bucketed": lambda load, compute, times: _during(load, compute, times, load.bucket_bytes),
    "ddp": _ddp,
    "zero1": _zero12,
    "zero2": _zero12,
    "zero3": lambda load, compute, times: _sharded(load, compute, times, ALL_GATHERS, REDUCE_SCATTERS),
    "fsdp": lambda load, compute, times: _sharded(load, compute, times, ALL_GATHERS[:1], REDUCE_SCATTERS[:1]),
    **{name: _pipe(way.schedule) for name, way in WAYS.items() if way.schedule is not None},
    "tensor": _tensor,
}
