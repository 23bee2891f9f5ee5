"""How a bucket of gradients becomes this rank's shard of their mean. Each way starts it and returns what to wait for.

    LinkScatter      GPUs: the backend's reduce-scatter; CPUs: a ring; in the background, while the backward goes on
    ExchangeScatter  CPUs of one host: an exchange by gloo's threads
    NeighbourScatter CPUs of one host, stage 1: each rank adds up its part out of the others' memory
    OrderedScatter   exact: an exchange, then sums in the order of ranks and virtual shards, and one division

gloo's own reduce_scatter sends as much as an all-reduce, and is one (pytorch#118911).
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

UNDER_WAY: Final = 2  # buckets whose whole gradients are held at a time, where they are not kept


class Scatter(Mean[Gradients]):
    """A way to shards of the mean; `at_most` buckets are under way at a time, None: any number."""

    def __init__(self, group: Group, at_most: int | None = None) -> None:
        super().__init__(group)
        self.at_most = at_most
        self.waiting: Callable[[bool], None] = lambda waits: None  # hears True before and False after every wait

    def start(self, bucket: Gradients) -> Wait:
        """Start a bucket; waiting hands this rank's part of the mean to the bucket, which keeps it.

        Waiting again is harmless, and raises again what it raised.
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
            arrive = None  # it holds the whole gradients
            if self.wanted:
                bucket.deliver(mean)

        return wait

    @abstractmethod
    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        """Start; what is returned waits for this rank's part."""


class LinkScatter(Scatter):
    """Let the backend reduce and scatter on a GPU, and sum in a ring on CPUs."""

    def __init__(self, group: Group, device: torch.device, at_most: int | None = None) -> None:
        super().__init__(group, at_most)
        self._background = Background(group, device)
        self._averages = device.type == "cuda" and is_nccl(group)
        self.scale = 1.0 if self._averages else 1.0 / self.ranks

    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        # Packed on the stream that made the gradients: they can be freed at once, and the message once it has been
        # waited for, without the allocator handing out memory that the other stream still reads.
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
    """Let gloo's threads exchange the parts, then add them up in the order of ranks.

    Between hosts this is a little slower than a ring; within one, rings wake Python for every message. It holds as much
    again as it sends: for units of stage 3, not for buckets.
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
    """Add up this rank's parts where the ranks of this host have them, in the order of ranks from this one on.

    A rank reads its own parts only, so sums can be taken in place. Before a flat tensor is written to again, all meet.
    """

    def __init__(self, group: Group, neighbours: Neighbours, flats: Mapping[int, Sequence[Tensor]]) -> None:
        super().__init__(group)
        self.scale = 1.0 / self.ranks
        self._neighbours = neighbours
        self._flats = flats  # of each flat tensor of parameters, by identity: the gradients of all ranks
        self._waited_for = 0  # buckets that are under way
        self._read: Wait = at_once

    def start(self, bucket: Gradients) -> Wait:
        """Start a bucket; when the last one has been waited for, all meet again."""
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
    """Choose the way for a device, where the ranks are and what was promised, never by how fast one is."""
    if exact:
        return OrderedScatter(group, device, at_most)
    if within_host:
        return ExchangeScatter(group, at_most)
    return LinkScatter(group, device, at_most)


def _as_parameter(bucket: Gradients, mine: Tensor) -> Tensor:
    """Return this rank's part as gradients are kept."""
    if isinstance(bucket, KeptGradients) and mine.dtype != bucket.home.dtype:
        own = bucket.home.parts(bucket.flat)[bucket.home.rank]
        return own.copy_(mine)
    return mine


def _after(wait: Wait, result: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def arrive() -> Tensor:
        wait()
        return result()

    return arrive
