"""Average buckets over ranks. Each class starts to average a bucket and returns a function that waits for the result.

AllReduceMean   the backend's all-reduce, on the backend's threads; gradients are divided before the sum
NcclMean        NCCL's all-reduce of many tensors in one launch and in place, on NCCL's stream
StreamMean      NCCL's all-reduce of a flat tensor or its cast, on a separate stream
OrderedMean     sums in the order of ranks and virtual shards, then one division: bitwise identical to one process

With NCCL the host never waits, so a CUDA graph can record the whole synchronization.
"""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions

from muster.ddp.collective_log import LOG
from muster.ddp.gradients import Bucket, FlatGradients, LooseGradients
from muster.ddp.primitives import chunks_of, exchange, ordered_reduce_scatter, ring_all_gather

Wait = Callable[[], object]  # waits, and raises communication errors; it may be called again
Group = dist.ProcessGroup | None
AnyBucket = TypeVar("AnyBucket", bound=Bucket)


class Mean(ABC, Generic[AnyBucket]):
    """A method of averaging buckets. Gradients are multiplied by `scale` when they are copied into the bucket."""

    at_most: int | None = None  # maximum number of buckets in progress; None: any number
    wanted = True  # False: the buckets in progress belong to an abandoned backward

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.scale = 1.0

    @abstractmethod
    def start(self, bucket: AnyBucket) -> Wait:
        """Start to average a complete bucket. When the returned wait has ended, the bucket contains the mean."""


class AllReduceMean(Mean[FlatGradients]):
    """Average with the backend's all-reduce, on the backend's threads."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.scale = 1.0 / self.ranks

    def start(self, bucket: FlatGradients) -> Wait:
        message = bucket.message
        if message is not bucket.flat:
            message.copy_(bucket.flat)
        finished = LOG.open("all_reduce", bucket.message_bytes)
        work = dist.all_reduce(message, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        LOG.call_after([work], finished)

        def wait() -> None:
            work.wait()
            if message is not bucket.flat:
                bucket.flat.copy_(message)

        return wait


class NcclMean(Mean[LooseGradients]):
    """Average gradients in place with NCCL, with one launch per bucket and no copies."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._options = AllreduceCoalescedOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def start(self, bucket: LooseGradients) -> Wait:
        """Average on NCCL's stream, after the gradients are computed. The returned wait blocks the compute stream."""
        group = self.group or dist.group.WORLD
        assert group is not None
        finished = LOG.open("all_reduce", bucket.message_bytes)
        work = group.allreduce_coalesced(bucket.tensors, self._options)
        LOG.call_after([work], finished)
        return work.wait


class StreamMean(Mean[FlatGradients]):
    """Average with NCCL on a separate stream."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self._background = Background(group, device)

    def start(self, bucket: FlatGradients) -> Wait:
        """Average on the separate stream, after the gradients are computed."""
        return self._background.start(lambda: self._average(bucket), "all_reduce", bucket.message_bytes)

    def _average(self, bucket: FlatGradients) -> None:
        if bucket.message is not bucket.flat:
            bucket.message.copy_(bucket.flat)
        dist.all_reduce(bucket.message, op=dist.ReduceOp.AVG, group=self.group)
        if bucket.message is not bucket.flat:
            bucket.flat.copy_(bucket.message)


class OrderedMean(Mean[FlatGradients]):
    """Add gradients in a fixed order and divide, while the backward continues."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self._background = Background(group, device)

    def start(self, bucket: FlatGradients) -> Wait:
        shards = [*bucket.closed, bucket.flat]
        size = bucket.message_bytes * len(shards)
        return self._background.start(lambda: ordered_mean(shards, bucket.flat, self.group), "ordered all_reduce", size)


class Background:
    """An executor that works in parallel with the computation: on CUDA an extra stream, on CPUs the group's thread."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._where = beside(device) if device.type == "cuda" else thread_of(group)
        self._index = device.index  # by number, the current stream is found four times as fast

    def start(self, work: Callable[[], object], operation: str, size: int) -> Wait:
        """Start work that runs after all work started before. On CUDA, the returned wait blocks the current stream.

        The collective log records `operation`, and `size` in bytes.
        """
        if isinstance(self._where, Worker):
            finished = LOG.open(operation, size)
            return self._where.start(lambda: (work(), finished()))
        self._where.wait_stream(torch.cuda.current_stream(self._index))
        with torch.cuda.stream(self._where):
            finished = LOG.open(operation, size)
            work()
            finished()
            done = self._where.record_event()
        return lambda: torch.cuda.current_stream(self._index).wait_event(done)


_Task = tuple[Future[None], Callable[[], object]]


class Worker:
    """A thread that runs tasks in the order of submission. The thread ends when this object is deleted."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # A daemon thread, so that this process can exit while the thread still waits for a lost peer.
        threading.Thread(target=_work, args=(self._tasks,), daemon=True).start()
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def start(self, work: Callable[[], object]) -> Wait:
        """Submit work. The returned wait raises an error of the work, if there was one."""
        done = Future[None]()
        self._tasks.put((done, work))
        return done.result


# All users of a group share one thread, because ranks match the messages of a group by their order.
_WORKERS: Final[MutableMapping[str, Worker]] = weakref.WeakValueDictionary()


def thread_of(group: Group) -> Worker:
    """Return the thread that communicates over a group."""
    given = group or dist.group.WORLD
    assert given is not None
    worker = _WORKERS.get(given.group_name)
    if worker is None:
        worker = _WORKERS[given.group_name] = Worker()
    return worker


def _work(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            done, work = task
            failed: BaseException | None = None
            try:
                work()
            except BaseException as error:
                failed = error
            del task, work  # free the task's tensors before the wait returns
            if failed is None:
                done.set_result(None)
            else:
                done.set_exception(failed)
            del done, failed  # drop these references while waiting for the next task


def beside(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream for communication beside the compute stream.

    Its priority is not raised. With a high priority, NCCL's kernels delayed matrix products that fill the whole GPU,
    and a step of GPT medium on two H200 took 2 % longer.
    """
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def mean_for(
    group: Group, device: torch.device, *, exact: bool, flat: bool
) -> Mean[FlatGradients] | Mean[LooseGradients]:
    """Choose an averaging class by device, backend and `exact`, never by measured speed.

    `flat` requests flat tensors, which can be cast or sent as one message.
    """
    if exact:
        return OrderedMean(group, device)
    if device.type != "cuda" or not is_nccl(group):
        return AllReduceMean(group)
    return StreamMean(group, device) if flat else NcclMean(group)


def is_nccl(group: Group) -> bool:
    """Return whether a group sends CUDA tensors with NCCL."""
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    return str(backend.name()).lower() == "nccl"


def ordered_mean(shards: Sequence[Tensor], out: Tensor, group: Group) -> None:
    """Store in `out` the mean over ranks and shards: add rank 0's shards, then rank 1's, ..., and divide once.

    `shards` are this rank's flat tensors. All have the length of `out`, and `out` may be one of them. Every rank has
    the same number s of shards. A rank sends s (n - 1) / n times the bytes of `out` for the sums, and (n - 1) / n times
    for the means.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = chunks_of(out, ranks)  # rank r computes the mean of part r
    ordered_mean_part([chunks_of(shard, ranks) for shard in shards], parts[rank], group)
    if ranks > 1:
        ring_all_gather(parts[rank], parts, group)


def ordered_mean_part(shards: Sequence[Sequence[Tensor]], mine: Tensor, group: Group) -> None:
    """Store in `mine` this rank's part of an ordered mean. Each shard is cut into one part per rank."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        mine.copy_(sum_in_order([parts[0] for parts in shards]))
    elif len(shards) == 1:
        ordered_reduce_scatter(shards[0], mine, group)
    else:
        sending = [torch.cat([parts[other] for parts in shards]) for other in range(ranks)]
        receiving = [torch.empty_like(sending[rank]) for _ in range(ranks)]
        exchange(sending, receiving, group)
        # Add rank 0's shards of this part, then rank 1's, ...
        mine.copy_(sum_in_order([piece for each in receiving for piece in each.view(len(shards), -1)]))
    if ranks * len(shards) > 1:
        mine.div_(ranks * len(shards))


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """Add tensors in the given order, and return the sum in new memory."""
    if len(tensors) == 1:
        return tensors[0].clone()
    total = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        total += tensor
    return total
