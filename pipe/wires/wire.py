"""How a tensor gets from one rank to another: on CPUs gloo, here; between GPUs NCCL (`pipe/wires/nccl.py`).

Tags tell gloo's messages apart, so they may be asked for in any order, long before they come. NCCL has no tags. Both
close for good with `abort`, which ends what other ranks wait for.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.gradients import is_dense
from muster.pipe.wires.failures import LostError

NO_TAG: Final = 1  # nobody sends with it
PEERS_TAG: Final = 8  # of names of memory, `pipe/wires/peers.py`; other tags: `pipe/wires/channels.py`
AT_ONCE: Final = timedelta(milliseconds=1)


Mark = torch.cuda.Event | None  # a moment in what a GPU does; None on CPUs


class Message(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Wait until it has come, or gone: on a GPU the current stream waits, not the host.

        Raises:
            LostError: it will not.
        """
        ...


class Wire(Protocol):
    """What tensors travel on; peers are ranks of the pipeline's group."""

    ordered: bool  # what goes from one rank to another is received in the order in which it is sent: there are no tags

    def expect(self, backlogs: Mapping[tuple[int, int], int]) -> None:
        """Hear how many messages there may be at once from a rank to a rank, until the next word."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Begin to send a dense tensor, which must stay as it is until then."""
        ...

    def mark(self) -> Mark:
        """Mark the last use of a buffer so far."""
        ...

    def receive(self, tensor: Tensor, peer: int, tag: int, after: Mark = None) -> Message:
        """Begin to receive into a dense tensor, which is free after the mark."""
        ...

    def abort(self) -> None:
        """Close all connections; nothing can be sent again."""
        ...


class WorkMessage:
    """A send or receive of a backend's, waited for as long as a time-out at most, if there is one."""

    __slots__ = ("_limit", "_peer", "_work")

    def __init__(self, work: dist.Work, peer: int, *timeout: timedelta) -> None:
        self._work, self._peer, self._limit = work, peer, timeout

    def wait(self) -> None:
        """Wait for it; of NCCL's the current stream waits."""
        try:
            self._work.wait(*self._limit)
        except RuntimeError as error:
            raise LostError(f"lost rank {self._peer}: {error}") from error


class GlooWire:
    """Messages of gloo's in a group of the pipeline's own, so that nobody else's are taken for them."""

    ordered = False

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._names = dist.get_process_group_ranks(group)  # of ranks, in the world

    def expect(self, backlogs: Mapping[tuple[int, int], int]) -> None:
        """Take any number of messages."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> WorkMessage:
        """Begin to send."""
        return self._begin(self._group.send, tensor, peer, tag)

    def mark(self) -> Mark:
        """Return nothing: what was done on a CPU is done."""
        return None

    def receive(self, tensor: Tensor, peer: int, tag: int, after: Mark = None) -> WorkMessage:
        """Begin to receive."""
        return self._begin(self._group.recv, tensor, peer, tag)

    def _begin(self, call: Callable[..., dist.Work], tensor: Tensor, peer: int, tag: int) -> WorkMessage:
        try:
            return WorkMessage(call([flat(tensor)], peer, tag), self._names[peer], self._timeout)
        except RuntimeError as error:
            raise LostError(f"lost rank {self._names[peer]}: {error}") from error

    def abort(self) -> None:
        """Close all connections of the group: gloo does so when a wait is over its time.

        A wait for a rank that is lost already ends at once, and closes no other connection.
        """
        for peer in range(self._group.size()):
            if peer != self._group.rank():
                with contextlib.suppress(RuntimeError):
                    self._group.recv([torch.empty(1)], peer, NO_TAG).wait(AT_ONCE)


def flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory as a contiguous tensor."""
    if tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor that fills its memory, in whatever order of dimensions: itself, or a copy."""
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


def own_group(process_group: dist.ProcessGroup | None, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a further group of a group's ranks: a collective of them, of no others."""
    ranks: Sequence[int] = dist.get_process_group_ranks(process_group)
    return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)  # type: ignore[no-any-return]
