"""Reduce-scatter buckets of gradients to shards of their mean. Each class starts to reduce a bucket and returns a
function that waits for the result.

    LinkScatter      GPUs: the backend's reduce-scatter; CPUs: a ring; both in the background
    ExchangeScatter  CPUs of one host: an exchange by gloo's threads
    SharedMemoryScatter CPUs of one host, stage 1: each rank sums its part from the others' shared memory
    OrderedScatter   exact: an exchange, sums in the order of ranks and virtual shards, and one division

gloo's own reduce_scatter is implemented as an all-reduce, and sends as many bytes as an all-reduce (pytorch#118911).
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
from muster.zero.shared_memory import SharedMemoryPeers, at_once, once

UNDER_WAY: Final = 2  # maximum number of buckets in progress in stages 2 and 3, each with whole gradients


class Scatter(Mean[Gradients]):
    """A method of reduce-scattering gradients. At most `at_most` buckets are in progress; None: any number."""

    def __init__(self, group: Group, at_most: int | None = None) -> None:
        super().__init__(group)
        self.at_most = at_most
        self.waiting: Callable[[bool], None] = lambda waits: None  # called with True before and False after every wait

    def start(self, bucket: Gradients) -> Wait:
        """Start a bucket. The returned wait delivers this rank's part of the mean to the bucket.

        A second wait does nothing, or raises the same error again.
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
            arrive = None  # this frees the whole gradients
            if self.wanted:
                bucket.deliver(mean)

        return wait

    @abstractmethod
    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        """Start to send a bucket. The returned function waits for this rank's part of the mean, and returns it."""


class LinkScatter(Scatter):
    """A reduce-scatter in the background: the backend's on a GPU, a ring on CPUs."""

    def __init__(self, group: Group, device: torch.device, at_most: int | None = None) -> None:
        super().__init__(group, at_most)
        self._background = Background(group, device)
        self._averages = device.type == "cuda" and is_nccl(group)
        self.scale = 1.0 if self._averages else 1.0 / self.ranks

    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        # Pack on the stream that computed the gradients, so that the gradients can be freed at once. The message is
        # kept until the wait, because the communication stream reads it.
        message = bucket.pack(self.scale)
        parts = bucket.flat_parameter.parts(message)
        mine = parts[bucket.flat_parameter.rank]

        def send() -> None:
            if message.is_cuda:
                op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
                reduce_scatter(mine, message, op=op, group=self.group)
            else:
                ring_reduce_scatter(parts, mine, self.group)

        wait = self._background.start(send, "reduce_scatter", message.nbytes) if self.ranks > 1 else at_once
        return _after(wait, lambda: _as_parameter(bucket, mine))


class ExchangeScatter(Scatter):
    """An exchange of parts by gloo's threads, followed by a sum in the order of ranks.

    Between hosts, it is slightly slower than a ring. Within one host it is faster, because a ring runs Python code for
    every message. It needs extra memory of the size of the message, so only the units of stage 3 use it.
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


class SharedMemoryScatter(Scatter):
    """A sum over ranks of this rank's part of the gradients. It reads them from shared memory and adds its own gradient
    first.

    No other rank reads this part, so it is summed in place. A barrier ensures that a flat tensor is not overwritten
    while other ranks read it.
    """

    def __init__(self, group: Group, peers: SharedMemoryPeers, flats: Mapping[int, Sequence[Tensor]]) -> None:
        super().__init__(group)
        self.scale = 1.0 / self.ranks
        self._peers = peers
        self._flats = flats  # the gradients of all ranks, by id of the parameters' flat tensor
        self._waited_for = 0  # number of buckets in progress
        self._read: Wait = at_once

    def start(self, bucket: Gradients) -> Wait:
        """Start a bucket. The wait for the last bucket in progress begins a barrier."""
        assert isinstance(bucket, KeptGradients)
        self._waited_for += 1
        bucket.before_writing = lambda: self._read()
        wait = super().start(bucket)

        def summed() -> None:
            wait()
            self._waited_for -= 1
            if not self._waited_for:
                self._read = self._peers.meeting()

        return once(summed)

    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        bucket.pack(self.scale)
        ready = self._peers.meeting()
        flat_parameter = bucket.flat_parameter

        def add() -> Tensor:
            finished = LOG.open("reduce_scatter in shared memory", flat_parameter.full_bytes)
            ready()
            flats = self._flats[id(flat_parameter)]
            mine = flats[flat_parameter.rank][flat_parameter.begin : flat_parameter.end]
            for step in range(1, self.ranks):
                mine.add_(flats[(flat_parameter.rank + step) % self.ranks][flat_parameter.begin : flat_parameter.end])
            finished()
            return mine

        return add


class OrderedScatter(Scatter):
    """A sum in the order of ranks and virtual shards."""

    def __init__(self, group: Group, device: torch.device, at_most: int | None = None) -> None:
        super().__init__(group, at_most)
        self._background = Background(group, device)

    def _send(self, bucket: Gradients) -> Callable[[], Tensor]:
        flat_parameter, own = bucket.flat_parameter, bucket.pack(1.0)
        shards = [flat_parameter.parts(shard) for shard in (*bucket.closed, own)]
        mine = flat_parameter.parts(own)[flat_parameter.rank]
        size = own.nbytes * len(shards)
        wait = self._background.start(
            lambda: ordered_mean_part(shards, mine, self.group), "ordered reduce_scatter", size
        )
        return _after(wait, lambda: mine)


def scatter_for(
    group: Group, device: torch.device, *, exact: bool, at_most: int | None, within_host: bool = False
) -> Scatter:
    """Choose a scatter class by device, placement of the ranks and exactness, never by measured speed."""
    if exact:
        return OrderedScatter(group, device, at_most)
    if within_host:
        return ExchangeScatter(group, at_most)
    return LinkScatter(group, device, at_most)


def _as_parameter(bucket: Gradients, mine: Tensor) -> Tensor:
    """Return this rank's part of the mean. `KeptGradients` need the mean in the dtype of the parameters."""
    if isinstance(bucket, KeptGradients) and mine.dtype != bucket.flat_parameter.dtype:
        own = bucket.flat_parameter.parts(bucket.flat)[bucket.flat_parameter.rank]
        return own.copy_(mine)
    return mine


def _after(wait: Wait, result: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def arrive() -> Tensor:
        wait()
        return result()

    return arrive
