"""How a bucket becomes the mean over ranks. Each way starts a bucket and returns what is waited for at the end.

AllReduceMean   the backend's all-reduce, by its own threads; gradients come divided by the number of ranks
NcclMean        NCCL's, of many tensors in one launch and in place, on its own stream
StreamMean      NCCL's, of a flat tensor or its cast, on a stream of ours
OrderedMean     sums in the order of ranks and virtual shards, then one division: the bits of one process

With NCCL the host never waits, so that a CUDA graph can record all of it.
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

Wait = Callable[[], object]  # raises what the communication raised; waiting again is harmless
Group = dist.ProcessGroup | None
AnyBucket = TypeVar("AnyBucket", bound=Bucket)


class Mean(ABC, Generic[AnyBucket]):
    """A way to the mean; `scale` is what gradients are multiplied with on their way into the bucket."""

    at_most: int | None = None  # buckets under way at a time; None: any number
    wanted = True  # False: what is waited for now belongs to a backward that was given up

    def __init__(self, group: Group) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.scale = 1.0

    @abstractmethod
    def start(self, bucket: AnyBucket) -> Wait:
        """Start a bucket whose gradients are all there; waiting leaves their mean in it."""


class AllReduceMean(Mean[FlatGradients]):
    """Let the backend's own threads sum."""

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
    """Let NCCL average gradients where they are, a bucket in one launch: one call of the host, and nothing copied."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._options = AllreduceCoalescedOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def start(self, bucket: LooseGradients) -> Wait:
        """Let NCCL's stream wait for the gradients, then average; waiting makes the computing stream wait."""
        group = self.group or dist.group.WORLD
        assert group is not None
        finished = LOG.open("all_reduce", bucket.message_bytes)
        work = group.allreduce_coalesced(bucket.tensors, self._options)
        LOG.call_after([work], finished)
        return work.wait


class StreamMean(Mean[FlatGradients]):
    """Let NCCL average on a stream beside the one that computes."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self._background = Background(group, device)

    def start(self, bucket: FlatGradients) -> Wait:
        """Let the stream wait for the gradients, then average."""
        return self._background.start(lambda: self._average(bucket), "all_reduce", bucket.message_bytes)

    def _average(self, bucket: FlatGradients) -> None:
        if bucket.message is not bucket.flat:
            bucket.message.copy_(bucket.flat)
        dist.all_reduce(bucket.message, op=dist.ReduceOp.AVG, group=self.group)
        if bucket.message is not bucket.flat:
            bucket.flat.copy_(bucket.message)


class OrderedMean(Mean[FlatGradients]):
    """Sum in order, while the backward runs."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self._background = Background(group, device)

    def start(self, bucket: FlatGradients) -> Wait:
        shards = [*bucket.closed, bucket.flat]
        size = bucket.message_bytes * len(shards)
        return self._background.start(lambda: ordered_mean(shards, bucket.flat, self.group), "ordered all_reduce", size)


class Background:
    """What works while this rank computes: on CUDA a stream beside the computing one, on CPUs the group's thread."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._where = beside(device) if device.type == "cuda" else thread_of(group)

    def start(self, work: Callable[[], object], operation: str, size: int) -> Wait:
        """Do some work after what the current stream has been given; on CUDA waiting makes the current stream wait.

        `operation` and `size` in bytes are for the log of collectives.
        """
        if isinstance(self._where, Worker):
            finished = LOG.open(operation, size)
            return self._where.start(lambda: (work(), finished()))
        self._where.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._where):
            finished = LOG.open(operation, size)
            work()
            finished()
            done = self._where.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


_Task = tuple[Future[None], Callable[[], object]]


class Worker:
    """A thread that does work in the order in which it comes, and ends with the last who holds this."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # A daemon: a peer that died must not keep this process from ending.
        threading.Thread(target=_work, args=(self._tasks,), daemon=True).start()
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def start(self, work: Callable[[], object]) -> Wait:
        """Have it done; waiting raises what it raised."""
        done = Future[None]()
        self._tasks.put((done, work))
        return done.result


# One thread a group, whoever shares it: messages of two threads of one group would be taken for one another.
_WORKERS: Final[MutableMapping[str, Worker]] = weakref.WeakValueDictionary()


def thread_of(group: Group) -> Worker:
    """Return the thread that sends and receives over a group."""
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
            del task, work  # what it was done with may be freed before anybody has waited
            if failed is None:
                done.set_result(None)
            else:
                done.set_exception(failed)
            del done, failed  # the next one may be long in coming


def beside(device: torch.device) -> torch.cuda.Stream:
    """Make a stream beside the one that computes.

    It has no priority: NCCL's kernels would push their way in front of matrix products that fill the whole GPU, which
    cost 2 % of a step of GPT medium on two H200.
    """
    return torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


def mean_for(
    group: Group, device: torch.device, *, exact: bool, flat: bool
) -> Mean[FlatGradients] | Mean[LooseGradients]:
    """Choose the way for a device and what was promised, never by how fast one is.

    `flat` asks for flat tensors: to send them as another type, or as the one message that they are.
    """
    if exact:
        return OrderedMean(group, device)
    if device.type != "cuda" or not is_nccl(group):
        return AllReduceMean(group)
    return StreamMean(group, device) if flat else NcclMean(group)


def is_nccl(group: Group) -> bool:
    """True when a group's CUDA tensors travel by NCCL."""
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cuda"))  # type: ignore[union-attr]
    return str(backend.name()).lower() == "nccl"


def ordered_mean(shards: Sequence[Tensor], out: Tensor, group: Group) -> None:
    """Put into `out` the mean over ranks and shards: added in the order rank 0's shards, rank 1's, ..., divided once.

    `shards` are this rank's, flat tensors of `out`'s length; every rank has as many. `out` may be one of them.
    Sends (n - 1) / n x shards x their bytes for the sums, and (n - 1) / n of `out` for the means.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = chunks_of(out, ranks)  # the mean of part r is made on rank r
    ordered_mean_part([chunks_of(shard, ranks) for shard in shards], parts[rank], group)
    if ranks > 1:
        ring_all_gather(parts[rank], parts, group)


def ordered_mean_part(shards: Sequence[Sequence[Tensor]], mine: Tensor, group: Group) -> None:
    """Put into `mine` this rank's part of an ordered mean; `shards` are cut into a part for each rank."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        mine.copy_(sum_in_order([parts[0] for parts in shards]))
    elif len(shards) == 1:
        ordered_reduce_scatter(shards[0], mine, group)
    else:
        sending = [torch.cat([parts[other] for parts in shards]) for other in range(ranks)]
        receiving = [torch.empty_like(sending[rank]) for _ in range(ranks)]
        exchange(sending, receiving, group)
        # rank 0's shards of my part, then rank 1's, ...
        mine.copy_(sum_in_order([piece for each in receiving for piece in each.view(len(shards), -1)]))
    if ranks * len(shards) > 1:
        mine.div_(ranks * len(shards))


def sum_in_order(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added first to last, in memory of its own."""
    if len(tensors) == 1:
        return tensors[0].clone()
    total = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        total += tensor
    return total
