"""The pipeline's own process groups and wires, separate from the user's messages, and small exchanges over them."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from muster.ddp.primitives.peers import timeout_of
from muster.pipe.wires.channels import (
    AGREE_TAG,
    BATCH_TAG,
    HEADER_TAG,
    LOSS_TAG,
    NOTHING,
    OUTPUT_TAG,
    TensorLayout,
    layout_of,
)
from muster.pipe.wires.failures import Board, LostError
from muster.pipe.wires.nccl import NcclWire
from muster.pipe.wires.peers import peers_of
from muster.pipe.wires.wire import GlooWire, Message, Wire, own_group


@dataclass(frozen=True)
class Connections:
    """A rank's connections to the other ranks of a pipeline."""

    rank: int
    ranks: int
    group: dist.ProcessGroup  # gloo, for CPU tensors
    given: dist.ProcessGroup | None  # the user's group
    device: torch.device
    wire: Wire  # the wire for activations and gradients
    control: Wire  # the wire for small CPU tensors
    board: Board
    # Sends to the next rank, until `agree` waits for them.
    _going: list[tuple[Message, Tensor]] = field(init=False, default_factory=list)
    # The next receive of `broadcast_numbers`.
    _coming: list[tuple[Message, Tensor]] = field(init=False, default_factory=list)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def broadcast_numbers(self, number: Tensor, source: int) -> Tensor:
        """Broadcast numbers from rank `source`: the same rank, and equally many numbers, in every call.

        With gloo, the next receive is posted now, so that the source need not wait for the other ranks.
        """
        if self.device.type == "cuda":
            dist.broadcast(number, group=self.given, group_src=source)
        elif self.rank == source:
            _wait([self.wire.send(number, rank, LOSS_TAG) for rank in self._others])
        else:
            message, number = self._coming.pop() if self._coming else self._next(number, source)
            message.wait()
            with suppress(LostError):  # the source may have ended after its last step
                self._coming.append(self._next(number, source))
        return number

    def _next(self, like: Tensor, source: int) -> tuple[Message, Tensor]:
        number = torch.empty_like(like)
        return self.wire.receive(number, source, LOSS_TAG), number

    def compare(self, batch: Sequence[int], in_words: str) -> None:
        """Compare this rank's batch with that of the previous rank, and send it to the next rank.

        This does not wait for the next rank, which may still be in the previous step; `agree` completes the send.

        Raises:
            ValueError: If the batches differ. Both ranks must pass the same number of values.
        """
        mine = torch.tensor(batch)
        theirs = torch.empty_like(mine)
        last = self.rank == self.ranks - 1
        if not last:
            self._going.append((self.control.send(mine, self.rank + 1, BATCH_TAG), mine))
        if self.rank:
            self.control.receive(theirs, self.rank - 1, BATCH_TAG).wait()
            if not torch.equal(mine, theirs):
                before = f"{int(theirs[0])} samples" if theirs[0] != mine[0] else "samples of another shape or type"
                names = dist.get_process_group_ranks(self.group)  # world ranks, for error messages
                raise ValueError(
                    f"rank {names[self.rank]} was passed {in_words}, but rank {names[self.rank - 1]} was passed "
                    f"{before}; pass tensors of the same shapes on every rank"
                )

    def agree(self) -> None:
        """Check that no rank has failed. A wait on a GPU stream reveals no failure, so GPU ranks also use gloo.

        Raises:
            LostError: If a rank has failed.
        """
        while self._going:
            self._going.pop()[0].wait()
        if self.device.type == "cuda":
            numbers = [torch.zeros(1) for _ in range(self.ranks)]
            coming = [self.control.receive(numbers[rank], rank, AGREE_TAG) for rank in self._others]
            _wait([*coming, *(self.control.send(numbers[self.rank], rank, AGREE_TAG) for rank in self._others)])

    def broadcast_tensor(self, tensor: Tensor | None, source: int) -> Tensor:
        """Broadcast a tensor from rank `source`; the other ranks pass None."""
        if tensor is not None:
            tensor = tensor.contiguous()
            _wait([self.control.send(TensorLayout.of(tensor).header(), rank, HEADER_TAG) for rank in self._others])
        else:
            header = NOTHING.header()
            self.control.receive(header, source, HEADER_TAG).wait()
            layout = layout_of(header)
            tensor = torch.empty(layout.shape, dtype=layout.dtype, device=self.device)
        if self.device.type == "cuda":
            dist.broadcast(tensor, group=self.given, group_src=source)
        elif self.rank == source:
            _wait([self.wire.send(tensor, rank, OUTPUT_TAG) for rank in self._others])
        else:
            self.wire.receive(tensor, source, OUTPUT_TAG).wait()
        return tensor

    def abort(self) -> None:
        """Close all connections, so that the waits of all ranks end."""
        self.control.abort()
        self.wire.abort()


def connect(process_group: dist.ProcessGroup | None, device: torch.device, peers: Iterable[int]) -> Connections | None:
    """Create the pipeline's groups and wires. This is a collective of the group's ranks. Return None if the group has
    only one rank.

    `peers` are the ranks that this one exchanges activations, gradients or tied weights with.

    Raises:
        ValueError: If layers are on a GPU, but the group has no NCCL.
    """
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return None
    has_nccl = "nccl" in dist.get_backend(process_group)
    timeout = timeout_of(process_group, torch.device("cuda" if has_nccl else "cpu"))
    if device.type == "cuda" and not has_nccl:
        raise ValueError(f"layers are on {device}, which gloo cannot send from; pass a group with NCCL")
    group = own_group(process_group, "gloo", timeout)
    control = GlooWire(group, timeout)
    peers = set(peers)
    wire: Wire = control
    if device.type == "cuda":
        wire = peers_of(group, peers, device, control) or NcclWire(group, peers, device, timeout)
    return Connections(group.rank(), group.size(), group, process_group, device, wire, control, Board(group))


def _wait(messages: Sequence[Message]) -> None:
    for each in messages:
        each.wait()
