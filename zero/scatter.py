"""Reduce a bucket of gradients to this rank's shard of their mean. Each class starts a bucket and returns a wait.

    LinkScatter      GPUs: the backend's reduce-scatter; CPUs: a ring; in the background of the backward
    ExchangeScatter  CPUs of one host: an exchange by gloo's threads
    NeighbourScatter CPUs of one host, stage 1: each rank sums its part from the others' shared memory
    OrderedScatter   exact: an exchange, sums in the order of ranks and virtual shards, and one division

gloo's own reduce_scatter is implemented as an all-reduce, and sends as much (pytorch#118911).
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.collective_log import LOG
from muster.ddp.means import Background, Group, Mean, Wait, is_nccl, ordered_mean_part
from muster.ddp.primitives import reduce_scatter, ring_reduce_scatter
from muster.zero.gradients import Gradients, KeptGradients
from muster.zero.neighbours import Neighbours, at_once, once

UNDER_WAY: Final = 2  # buckets with whole gradients at a time, if gradients are not kept


class Scatter(Mean[Gradients]):
    """A way to scatter the mean. At most `at_most` buckets are in progress at a time; None: any number."""

    def __init__(self, group: Group, at_most: int | None = None) -> None:
        super().__init__(group)
        self.at_most = at_most
        self.waiting: Callable[[bool], None] = lambda waits: None  # called with True before and False after every wait

    def start(self, bucket: Gradients) -> Wait:
        """Start a bucket. Waiting delivers this rank's part of the mean to the bucket.

        Waiting again does nothing, or raises the same error again.
        """
        arrive: Callable[[], Tensor] | None = self._send(bucket)

        def wait() -> None:
            nonlocal arrive
            if arrive is None:
                return
            self.waiting(True)
            try:
                mean = arrive()
            finally:
                self.waiting(False)
            arrive = None  # frees the whole gradients
            if self.wanted:
                bucket.deliver(mean)

        return wait

    @abstractmethod
    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        """Start; the returned function waits for this rank's part."""


class LinkScatter(Scatter):
    """The backend's reduce-scatter on a GPU, a ring on CPUs."""

    def __init__(self, group: Group, device: torch.device, at_most: int | None = None) -> None:
        super().__init__(group, at_most)
        self._background = Background(group, device)
        self._averages = device.type == "cuda" and is_nccl(group)
        self.scale = 1.0 if self._averages else 1.0 / self.ranks

    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        # Packed on the stream that made the gradients. So they can be freed at once, and the message after the wait,
        # and the allocator never reuses memory that the other stream still reads.
        message = bucket.pack(self.scale)
        parts = bucket.home.parts(message)
        mine = parts[bucket.home.rank]

        def send() -> None:
            if message.is_cuda:
                op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
                reduce_scatter(mine, message, op=op, group=self.group)
            else:
                ring_reduce_scatter(parts, mine, self.group)

        wait = self._background.start(send, "reduce_scatter", message.nbytes) if self.ranks > 1 else at_once
        return _after(wait, lambda: _as_parameter(bucket, mine))


class ExchangeScatter(Scatter):
    """Exchange the parts with gloo's threads, then sum them in the order of ranks.

    Between hosts this is a little slower than a ring. Within one host, a ring would wake Python for every message. It
    needs as much memory again as it sends, so it is used for units of stage 3, not for buckets.
    """

    def __init__(self, group: Group, at_most: int | None = None) -> None:
        super().__init__(group, at_most)
        self.scale = 1.0 / self.ranks

    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        message = bucket.pack(self.scale)
        received = torch.empty_like(message)
        finished = LOG.open("all_to_all", message.nbytes)
        work = dist.all_to_all_single(received, message, group=self.group, async_op=True)
        assert work is not None
        LOG.call_after([work], finished)

        def add() -> Tensor:
            mine, *others = received.view(self.ranks, -1)  # (ranks, elements of a shard)
            for each in others:
                mine += each
            return _as_parameter(bucket, mine)

        return _after(work.wait, add)


class NeighbourScatter(Scatter):
    """Sum this rank's parts in the shared memory of this host's ranks, in the order of ranks from this one on.

    A rank reads only its own parts, so sums are computed in place. A barrier precedes the next write to a flat tensor.
    """

    def __init__(self, group: Group, neighbours: Neighbours, flats: Mapping[int, Sequence[Tensor]]) -> None:
        super().__init__(group)
        self.scale = 1.0 / self.ranks
        self._neighbours = neighbours
        self._flats = flats  # by id of a flat tensor of parameters: the gradients of all ranks
        self._waited_for = 0  # number of buckets in progress
        self._read: Wait = at_once

    def start(self, bucket: Gradients) -> Wait:
        """Start a bucket. After the wait for the last one, a barrier begins."""
        assert isinstance(bucket, KeptGradients)
        self._waited_for += 1
        bucket.before_writing = lambda: self._read()
        wait = super().start(bucket)

        def summed() -> None:
            wait()
            self._waited_for -= 1
            if not self._waited_for:
                self._read = self._neighbours.meeting()

        return once(summed)

    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        bucket.pack(self.scale)
        ready = self._neighbours.meeting()
        home = bucket.home

        def add() -> Tensor:
            finished = LOG.open("reduce_scatter in shared memory", home.full_bytes)
            ready()
            flats = self._flats[id(home)]
            mine = flats[home.rank][home.begin : home.end]
            for step in range(1, self.ranks):
                mine.add_(flats[(home.rank + step) % self.ranks][home.begin : home.end])
            finished()
            return mine

        return add


class OrderedScatter(Scatter):
    """Sum in the order of ranks and virtual shards."""

    def __init__(self, group: Group, device: torch.device, at_most: int | None = None) -> None:
        super().__init__(group, at_most)
        self._background = Background(group, device)

    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        home, own = bucket.home, bucket.pack(1.0)
        shards = [home.parts(shard) for shard in (*bucket.closed, own)]
        mine = home.parts(own)[home.rank]
        size = own.nbytes * len(shards)
        wait = self._background.start(
            lambda: ordered_mean_part(shards, mine, self.group), "ordered reduce_scatter", size
        )
        return _after(wait, lambda: mine)


def scatter_for(
    group: Group, device: torch.device, *, exact: bool, at_most: int | None, within_host: bool = False
) -> Scatter:
    """Choose a scatter by device, placement of the ranks and exactness, never by measured speed."""
    if exact:
        return OrderedScatter(group, device, at_most)
    if within_host:
        return ExchangeScatter(group, at_most)
    return LinkScatter(group, device, at_most)


def _as_parameter(bucket: Gradients, mine: Tensor) -> Tensor:
    """Return this rank's part in the type of the parameters."""
    if isinstance(bucket, KeptGradients) and mine.dtype != bucket.home.dtype:
        own = bucket.home.parts(bucket.flat)[bucket.home.rank]
        return own.copy_(mine)
    return mine


def _after(wait: Wait, result: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def arrive() -> Tensor:
        wait()
        return result()

    return arrive
