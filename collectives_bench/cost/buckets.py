"""Gradient buckets: how they are filled, when each one is sent, and how the time of a step depends on their size. Pure.

    backward   ====g1====g2====g3====g4|           gradients become ready while the backward runs
    bucket 1        [g1 g2]------------|--> sent
    bucket 2                  [g3 g4]--|-------> sent     time after the backward's end is exposed

A bucket is sent when its last gradient is ready and fewer than c collectives are running:
start_i = max(ready_i, end_{i - c}). gloo's process group has c = 2 threads, NCCL one stream. Collectives that run at
the same time share the link. On simulated nodes, two concurrent collectives of 2 MB or more took 0.97 to 1.01 times as
long as two in sequence.

With small buckets, the latency is paid often; large buckets wait long for their last gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.models.anatomy import Anatomy

MB: Final = 2**20
TORCH_BUCKET: Final = 25 * MB  # default of DistributedDataParallel's bucket_cap_mb
TORCH_FIRST: Final = 1 * MB  # DistributedDataParallel's limit for the first bucket
OWN_FIRST: Final = 1 * MB  # limit of the first of several buckets in mode bucketed (ddp/buckets.py)
OWN_ALONE: Final = 4 * MB  # on CPUs, mode bucketed sends a gradient of at least this size alone, without a copy
SWEEP: Final = tuple(count * MB for count in (1, 2, 4, 8, 16, 25, 32, 64))
GLOO_THREADS: Final = 2
GLOO_HOST_S: Final = (
    100e-6  # cost of an async call, whose thread needs a core (two busy cores: median 20 us, p90 157, mean 234)
)
NCCL_STREAMS: Final = 1
NCCL_HOST_S: Final = 20e-6

ROUNDING: Final = 1e-12  # seconds
TimeOf = Callable[[int], float]  # bytes of a collective -> its seconds if no other collective uses the link


@dataclass(frozen=True)
class PredictedBucket:
    """Gradients that are sent together: their bytes, and the time in the backward at which they are ready."""

    nbytes: int
    ready_s: float


@dataclass(frozen=True)
class Lanes:
    """The number of collectives that a backend runs at the same time. These collectives share the link."""

    concurrent: int = NCCL_STREAMS
    host_s: float = 0.0  # time by which starting a collective delays the backward
    slowed: float = 1.0  # factor of the backward's time while a collective runs, because they share cores
    busy_s: float = 0.0  # additional time of a collective that has to wait for a core beside the backward

    @classmethod
    def of(cls, backend: str) -> "Lanes":
        """Return the number of collectives that a backend's process group runs at the same time."""
        if backend == "gloo":
            return cls(GLOO_THREADS, host_s=GLOO_HOST_S)
        return cls(NCCL_STREAMS, host_s=NCCL_HOST_S)


@dataclass(frozen=True)
class CurvePoint:
    """One bucket size, with the time from the beginning of the backward to the last byte."""

    bucket_bytes: int
    buckets: int
    step_s: float
    exposed_s: float


@dataclass(frozen=True)
class BestSize:
    """The best size of a curve, compared with the second best and with torch's default."""

    best: CurvePoint
    runner_up: CurvePoint | None
    torch: CurvePoint | None
    error: float  # relative error of predictions

    @property
    def margin(self) -> float:
        """The share by which the runner-up is slower; 0 without a runner-up."""
        return self.runner_up.step_s / self.best.step_s - 1 if self.runner_up else 0.0

    @property
    def torch_margin(self) -> float | None:
        """The share by which torch's default is slower; None if unknown."""
        return self.torch.step_s / self.best.step_s - 1 if self.torch else None

    @property
    def is_clear(self) -> bool:
        """True if the runner-up is slower by more than the error."""
        return self.margin > self.error


def gradients_of(model: Anatomy, itemsize: int, backward_s: float) -> list[PredictedBucket]:
    """Return a model's gradients in the order in which they become ready."""
    return [PredictedBucket(tensor.elements * itemsize, share * backward_s) for tensor, share in model.ready()]


def registered(model: Anatomy, itemsize: int, backward_s: float) -> list[PredictedBucket]:
    """Return a model's gradients in reverse order of registration. Muster's own wrappers send them in this order."""
    ready = {tensor.name: share * backward_s for tensor, share in model.ready()}
    return [
        PredictedBucket(tensor.elements * itemsize, ready[tensor.name])
        for tensor in reversed(model.tensors)
        if tensor.trained
    ]


def at_most(gradients: Sequence[PredictedBucket], cap: int) -> list[PredictedBucket]:
    """Fill buckets up to `cap` bytes in the order of readiness. A larger gradient gets its own bucket."""
    return _launched(gradients, _dealt(gradients, cap, cap, None))


def as_ours(
    gradients: Sequence[PredictedBucket], cap: int | None, *, first: int = OWN_FIRST, alone: int | None = OWN_ALONE
) -> list[PredictedBucket]:
    """Fill buckets as mode bucketed does, each with at most `cap` bytes; without a cap there is one bucket.

    If there are several buckets, the first one is small, and each gradient of at least `alone` bytes (None on GPUs)
    gets its own bucket. `gradients` are in reverse order of registration.
    """
    if cap is None:
        return _launched(gradients, [list(range(len(gradients)))])
    dealt = _dealt(gradients, cap, cap, None)
    if len(dealt) > 1:
        dealt = _dealt(gradients, cap, min(cap, first), alone)
    return _launched(gradients, dealt)


def _dealt(gradients: Sequence[PredictedBucket], cap: int, first: int, alone: int | None) -> list[list[int]]:
    """Assign gradients, by index, to buckets. Each gradient of at least `alone` bytes gets its own bucket."""
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


def _launched(gradients: Sequence[PredictedBucket], dealt: Sequence[Sequence[int]]) -> list[PredictedBucket]:
    """Order buckets by their last gradients. Each bucket waits for all its gradients and for the buckets before it."""
    buckets, ready_s = list[PredictedBucket](), 0.0
    for places in sorted(dealt, key=lambda places: places[-1]):
        ready_s = max(ready_s, *(gradients[place].ready_s for place in places))
        buckets.append(PredictedBucket(sum(gradients[place].nbytes for place in places), ready_s))
    return buckets


def as_torch(
    gradients: Iterable[PredictedBucket], cap: int = TORCH_BUCKET, first: int = TORCH_FIRST
) -> list[PredictedBucket]:
    """Fill buckets as DistributedDataParallel does after its first step: fill each bucket until it reaches its cap."""
    buckets: list[PredictedBucket] = []
    size, ready_s = 0, 0.0
    for each in gradients:
        size, ready_s = size + each.nbytes, each.ready_s
        if size >= (cap if buckets else first):
            buckets.append(PredictedBucket(size, ready_s))
            size = 0
    return [*buckets, PredictedBucket(size, ready_s)] if size else buckets


@dataclass(frozen=True)
class OverlappedBackward:
    """A backward with collectives beside it: seconds from its beginning until the last bucket is sent, and its end."""

    sent_s: float
    backward_s: float

    @property
    def end_s(self) -> float:
        """The time when both have ended."""
        return max(self.sent_s, self.backward_s)


def finish_s(buckets: Sequence[PredictedBucket], time_of: TimeOf, lanes: Lanes) -> float:
    """Return the time from the beginning of the backward until the last bucket has been sent."""
    return overlapped(buckets, max((each.ready_s for each in buckets), default=0.0), time_of, lanes).sent_s


def overlapped(
    buckets: Sequence[PredictedBucket], backward_s: float, time_of: TimeOf, lanes: Lanes
) -> OverlappedBackward:
    """Simulate a backward and the collectives that it launches.

    Between events, all running collectives share the link equally. Starting a collective delays the backward, and with
    it all gradients that become ready later. While a collective runs, the backward is slower by `lanes.slowed`. A
    collective that starts before the end of the backward takes `lanes.busy_s` longer.
    """
    waiting = [PredictedBucket(each.nbytes, each.ready_s + n * lanes.host_s) for n, each in enumerate(buckets, start=1)]
    whole_s = backward_s + len(buckets) * lanes.host_s
    now, done, running = 0.0, 0.0, list[float]()  # done: seconds of the backward; running: link seconds still needed
    ended_s = sent_s = 0.0
    while waiting or running or done < whole_s:
        while waiting and len(running) < lanes.concurrent and waiting[0].ready_s <= done + ROUNDING:
            beside_s = lanes.busy_s if done < whole_s - ROUNDING else 0.0
            running.append(time_of(waiting.pop(0).nbytes) + beside_s)
        pace = 1 / lanes.slowed if running else 1.0
        until = [left * len(running) for left in running]
        if done < whole_s:
            until.append((whole_s - done) / pace)
        if waiting and len(running) < lanes.concurrent:
            until.append((waiting[0].ready_s - done) / pace)
        step = max(min(until), 0.0)
        now, before = now + step, len(running)
        running = [left for each in running if (left := each - step / before) > ROUNDING]
        sent_s = now if len(running) < before else sent_s
        if done < whole_s:
            done = min(done + step * pace, whole_s) if whole_s - done - step * pace > ROUNDING else whole_s
            ended_s = now
    return OverlappedBackward(sent_s, ended_s)


def curve(
    gradients: Sequence[PredictedBucket],
    time_of: TimeOf,
    lanes: Lanes,
    sizes: Sequence[int] = SWEEP,
    fill: Callable[[Sequence[PredictedBucket], int], list[PredictedBucket]] = as_ours,
) -> list[CurvePoint]:
    """Predict the time of a step, from the beginning of the backward, for each bucket size.

    Raises:
        UsageError: if there are no sizes, or a size is not positive.
    """
    if not sizes or min(sizes) <= 0:
        raise UsageError("--buckets: expected one or more positive sizes, such as 1M:64M")
    backward_s = max((each.ready_s for each in gradients), default=0.0)
    points = []
    for size in sizes:
        buckets = fill(gradients, size)
        end_s = max(finish_s(buckets, time_of, lanes), backward_s + len(buckets) * lanes.host_s)
        points.append(CurvePoint(size, len(buckets), end_s, end_s - backward_s))
    return points


def choose(points: Sequence[CurvePoint], error: float) -> BestSize:
    """Choose the best point. Of several sizes that result in the same buckets, only the smallest is considered."""
    distinct: dict[tuple[int, float], CurvePoint] = {}
    for point in sorted(points, key=lambda each: each.bucket_bytes):
        distinct.setdefault((point.buckets, point.step_s), point)
    ranked = sorted(distinct.values(), key=lambda each: each.step_s)
    torch = next((point for point in points if point.bucket_bytes == TORCH_BUCKET), None)
    return BestSize(ranked[0], ranked[1] if len(ranked) > 1 else None, torch, error)
