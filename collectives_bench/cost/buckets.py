"""Buckets of gradients: which ones are made, when each is sent, and how long a step takes by bucket size. Pure.

    backward   ====g1====g2====g3====g4|           gradients become ready while the backward runs
    bucket 1        [g1 g2]------------|--> sent
    bucket 2                  [g3 g4]--|-------> sent     time after the backward's end is exposed

A bucket goes out when its last gradient is ready and fewer than c collectives are under way:
start_i = max(ready_i, end_{i - c}). gloo's process group has c = 2 threads, NCCL one stream. Collectives under way
together share the link: in the box two at once took 0.97 to 1.01 of the time of one after the other, from 2 MB on.

Small buckets pay the latency often, large ones wait long for their last gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.models.anatomy import Anatomy

MB: Final = 2**20
TORCH_BUCKET: Final = 25 * MB  # DistributedDataParallel's bucket_cap_mb
TORCH_FIRST: Final = 1 * MB  # its limit for the first bucket
OWN_FIRST: Final = 1 * MB  # mode bucketed: the first of several buckets (ddp/buckets.py)
OWN_ALONE: Final = 4 * MB  # mode bucketed on CPUs: a gradient of this size or more is sent alone, without a copy
SWEEP: Final = tuple(count * MB for count in (1, 2, 4, 8, 16, 25, 32, 64))
GLOO_THREADS: Final = 2
GLOO_HOST_S: Final = (
    100e-6  # an async call on two busy cores: median 20 us, p90 157, mean 234, as its thread occupies the core
)
NCCL_STREAMS: Final = 1
NCCL_HOST_S: Final = 20e-6

ROUNDING: Final = 1e-12  # seconds
TimeOf = Callable[[int], float]  # bytes of a collective -> seconds, with the link to itself


@dataclass(frozen=True)
class Bucket:
    """One gradient, or several sent together: their bytes, and when in the backward they become ready."""

    nbytes: int
    ready_s: float


@dataclass(frozen=True)
class Lanes:
    """How many collectives are sent at once; they share the link."""

    concurrent: int = NCCL_STREAMS
    host_s: float = 0.0  # time that starting a collective takes from the backward

    @classmethod
    def of(cls, backend: str) -> "Lanes":
        """Return the lanes of a backend's process group."""
        if backend == "gloo":
            return cls(GLOO_THREADS, host_s=GLOO_HOST_S)
        return cls(NCCL_STREAMS, host_s=NCCL_HOST_S)


@dataclass(frozen=True)
class Point:
    """One bucket size of the curve, and the time from the beginning of the backward to the last byte."""

    bucket_bytes: int
    buckets: int
    step_s: float
    exposed_s: float


@dataclass(frozen=True)
class Choice:
    """The best size of a curve, compared with the second best and with torch's default."""

    best: Point
    runner_up: Point | None
    torch: Point | None
    error: float  # relative error of predictions

    @property
    def margin(self) -> float:
        """How much slower the runner-up is, as a share; 0 without a runner-up."""
        return self.runner_up.step_s / self.best.step_s - 1 if self.runner_up else 0.0

    @property
    def torch_margin(self) -> float | None:
        """How much slower torch's default is, as a share."""
        return self.torch.step_s / self.best.step_s - 1 if self.torch else None

    @property
    def is_clear(self) -> bool:
        """True when the runner-up is slower by more than the error."""
        return self.margin > self.error


def gradients_of(model: Anatomy, itemsize: int, backward_s: float) -> list[Bucket]:
    """Return a model's gradients in the order in which they become ready."""
    return [Bucket(tensor.elements * itemsize, share * backward_s) for tensor, share in model.ready()]


def registered(model: Anatomy, itemsize: int, backward_s: float) -> list[Bucket]:
    """Return a model's gradients in the reverse order of registration, in which our own wrappers send them."""
    ready = {tensor.name: share * backward_s for tensor, share in model.ready()}
    return [Bucket(tensor.elements * itemsize, ready[tensor.name]) for tensor in reversed(model.tensors)]


def at_most(gradients: Sequence[Bucket], cap: int) -> list[Bucket]:
    """Fill buckets up to `cap` bytes in ready order; a larger gradient gets a bucket of its own."""
    return _launched(gradients, _dealt(gradients, cap, cap, None))


def as_ours(
    gradients: Sequence[Bucket], cap: int | None, *, first: int = OWN_FIRST, alone: int | None = OWN_ALONE
) -> list[Bucket]:
    """Fill buckets as mode bucketed does: each holds at most `cap` bytes; without a cap there is one bucket.

    If there are several, the first is small, and gradients of `alone` bytes or more get one each (None on GPUs).
    `gradients` are in the reverse order of registration.
    """
    if cap is None:
        return _launched(gradients, [list(range(len(gradients)))])
    dealt = _dealt(gradients, cap, cap, None)
    if len(dealt) > 1:
        dealt = _dealt(gradients, cap, min(cap, first), alone)
    return _launched(gradients, dealt)


def _dealt(gradients: Sequence[Bucket], cap: int, first: int, alone: int | None) -> list[list[int]]:
    """Assign gradients, by index, to buckets; those of `alone` bytes get one each, and the open one stays open."""
    closed, open_, filled = list[list[int]](), list[int](), 0
    for place, each in enumerate(gradients):
        if alone is not None and each.nbytes >= alone:
            closed.append([place])
            continue
        if open_ and filled + each.nbytes > (cap if closed else first):
            closed.append(open_)
            open_, filled = [], 0
        open_.append(place)
        filled += each.nbytes
    return [*closed, open_] if open_ else closed


def _launched(gradients: Sequence[Bucket], dealt: Sequence[Sequence[int]]) -> list[Bucket]:
    """Order buckets by their last gradients; each waits for all of its gradients and for the buckets before it."""
    buckets, ready_s = list[Bucket](), 0.0
    for places in sorted(dealt, key=lambda places: places[-1]):
        ready_s = max(ready_s, *(gradients[place].ready_s for place in places))
        buckets.append(Bucket(sum(gradients[place].nbytes for place in places), ready_s))
    return buckets


def as_torch(gradients: Iterable[Bucket], cap: int = TORCH_BUCKET, first: int = TORCH_FIRST) -> list[Bucket]:
    """Fill buckets as DistributedDataParallel does from its second step on: each until it has reached its cap."""
    buckets: list[Bucket] = []
    size, ready_s = 0, 0.0
    for each in gradients:
        size, ready_s = size + each.nbytes, each.ready_s
        if size >= (cap if buckets else first):
            buckets.append(Bucket(size, ready_s))
            size = 0
    return [*buckets, Bucket(size, ready_s)] if size else buckets


def finish_s(buckets: Sequence[Bucket], time_of: TimeOf, lanes: Lanes) -> float:
    """Return when the last bucket has been sent, counted from the beginning of the backward.

    Between events, every collective under way gets an equal part of the link. Starting one delays the backward, and
    so all gradients that become ready later.
    """
    waiting = [Bucket(each.nbytes, each.ready_s + n * lanes.host_s) for n, each in enumerate(buckets, start=1)]
    now, running = 0.0, list[float]()  # seconds of link time that each collective under way still needs
    while waiting or running:
        while waiting and len(running) < lanes.concurrent and waiting[0].ready_s <= now:
            running.append(time_of(waiting.pop(0).nbytes))
        until = [left * len(running) for left in running]
        if waiting and len(running) < lanes.concurrent:
            until.append(waiting[0].ready_s - now)
        step = max(min(until), 0.0)
        running = [left - step / len(running) for left in running if left - step / len(running) > ROUNDING]
        now += step
    return now


def curve(
    gradients: Sequence[Bucket],
    time_of: TimeOf,
    lanes: Lanes,
    sizes: Sequence[int] = SWEEP,
    fill: Callable[[Sequence[Bucket], int], list[Bucket]] = as_ours,
) -> list[Point]:
    """Predict the step of each bucket size, from the beginning of the backward.

    Raises:
        UsageError: there are no sizes, or one is not positive.
    """
    if not sizes or min(sizes) <= 0:
        raise UsageError("--buckets: wanted one size or more, all positive, such as 1M:64M")
    backward_s = max((each.ready_s for each in gradients), default=0.0)
    points = []
    for size in sizes:
        buckets = fill(gradients, size)
        end_s = max(finish_s(buckets, time_of, lanes), backward_s + len(buckets) * lanes.host_s)
        points.append(Point(size, len(buckets), end_s, end_s - backward_s))
    return points


def choose(points: Sequence[Point], error: float) -> Choice:
    """Name the best point; sizes that make the same buckets count as one, the smallest of them."""
    distinct: dict[tuple[int, float], Point] = {}
    for point in sorted(points, key=lambda each: each.bucket_bytes):
        distinct.setdefault((point.buckets, point.step_s), point)
    ranked = sorted(distinct.values(), key=lambda each: each.step_s)
    torch = next((point for point in points if point.bucket_bytes == TORCH_BUCKET), None)
    return Choice(ranked[0], ranked[1] if len(ranked) > 1 else None, torch, error)
