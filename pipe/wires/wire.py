"""Send tensors from rank to rank: the protocol of a wire, and its implementation for CPUs with gloo.

GPUs use `pipe/wires/peers.py` or `pipe/wires/nccl.py`. Gloo matches messages by tags, so receives may be posted in any
order, long before the messages are sent. NCCL has no tags. `abort` closes a wire for good, and ends the waits of other
ranks.
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

NO_TAG: Final = 1  # no message with this tag is ever sent
PEERS_TAG: Final = 8  # used for memory handles in `pipe/wires/peers.py`; for other tags see `pipe/wires/channels.py`
AT_ONCE: Final = timedelta(milliseconds=1)


Mark = torch.cuda.Event | None  # a point in the work of a GPU; None on CPUs


class Message(Protocol):
    """A send or receive in progress."""

    def wait(self) -> None:
        """Wait until the message has been sent or received. On a GPU the current stream waits instead of the host.

        Raises:
            LostError: If the message cannot be sent or received.
        """
        ...


class Wire(Protocol):
    """A connection to other ranks of the pipeline's group."""

    ordered: bool  # True: without tags, so messages between two ranks are received in the order in which they are sent

    def expect(self, backlogs: Mapping[tuple[int, int], int]) -> None:
        """Set the largest number of messages in transit for every pair of ranks; it applies until the next call."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Begin to send a dense tensor, which must not change until the message has been sent."""
        ...

    def mark(self) -> Mark:
        """Return a mark after all uses of a buffer so far."""
        ...

    def receive(self, tensor: Tensor, peer: int, tag: int, after: Mark = None) -> Message:
        """Begin to receive into a dense tensor, which may be overwritten after the mark."""
        ...

    def abort(self) -> None:
        """Close all connections. Nothing can be sent afterwards."""
        ...


class WorkMessage:
    """A send or receive of a backend. `wait` lasts at most as long as the timeout, if one is set."""

    __slots__ = ("_limit", "_peer", "_work")

    def __init__(self, work: dist.Work, peer: int, *timeout: timedelta) -> None:
        self._work, self._peer, self._limit = work, peer, timeout

    def wait(self) -> None:
        """Wait for the message; with NCCL only the current stream waits, not the host."""
        try:
            self._work.wait(*self._limit)
        except RuntimeError as error:
            raise LostError(f"lost rank {self._peer}: {error}") from error


class GlooWire:
    """Gloo messages in the pipeline's own group, so that they cannot be confused with the user's."""

    ordered = False

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group, self._timeout = group, timeout
        self._names = dist.get_process_group_ranks(group)  # world ranks, for error messages

    def expect(self, backlogs: Mapping[tuple[int, int], int]) -> None:
        """Do nothing: any number of messages may be in transit."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> WorkMessage:
        """Begin to send a dense tensor."""
        return self._begin(self._group.send, tensor, peer, tag)

    def mark(self) -> Mark:
        """Return None, because calls on a CPU return when their work is done."""
        return None

    def receive(self, tensor: Tensor, peer: int, tag: int, after: Mark = None) -> WorkMessage:
        """Begin to receive into a dense tensor."""
        return self._begin(self._group.recv, tensor, peer, tag)

    def _begin(self, call: Callable[..., dist.Work], tensor: Tensor, peer: int, tag: int) -> WorkMessage:
        try:
            return WorkMessage(call([flat(tensor)], peer, tag), self._names[peer], self._timeout)
        except RuntimeError as error:
            raise LostError(f"lost rank {self._names[peer]}: {error}") from error

    def abort(self) -> None:
        """Close all connections of the group, which gloo does when a wait times out.

        This waits for every rank, because a wait for a rank that is already lost closes no other connection.
        """
        for peer in range(self._group.size()):
            if peer != self._group.rank():
                with contextlib.suppress(RuntimeError):
                    self._group.recv([torch.empty(1)], peer, NO_TAG).wait(AT_ONCE)


def flat(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as a contiguous tensor."""
    if tensor.is_contiguous():
        return tensor
    return tensor.as_strided((tensor.numel(),), (1,))


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it fills its memory, in any order of dimensions; else a contiguous copy."""
    return tensor if tensor.is_contiguous() or is_dense(tensor) else tensor.contiguous()


def own_group(process_group: dist.ProcessGroup | None, backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """Create another group with the same ranks. Only these ranks call it."""
    ranks: Sequence[int] = dist.get_process_group_ranks(process_group)
    return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)  # type: ignore[no-any-return]
