"""Where the ranks of a pipeline meet: groups and wires of its own, apart from everybody else's messages."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipe.channels import HEADER_TAG, LOSS_TAG, OUTPUT_TAG, Layout, layout_of
from pipe.failures import Board
from pipe.wires import GlooWire, Wire, own_group


@dataclass(frozen=True)
class Meeting:
    """What a rank has of its group."""

    rank: int
    ranks: int
    group: dist.ProcessGroup  # gloo, on CPUs
    wire: Wire  # of activations and gradients
    control: Wire  # of small things on CPUs
    board: Board

    def tell_all(self, number: Tensor, source: int) -> Tensor:
        """Return the scalar that rank `source` has."""
        if self.rank != source:
            self.wire.receive(number, source, LOSS_TAG).wait()
            return number
        under_way = [self.wire.send(number, rank, LOSS_TAG) for rank in range(self.ranks) if rank != source]
        for each in under_way:
            each.wait()
        return number

    def deal(self, tensor: Tensor | None, source: int, device: torch.device) -> Tensor:
        """Return a copy of the tensor that rank `source` has: only that one passes it."""
        others = [rank for rank in range(self.ranks) if rank != source]
        if self.rank == source:
            assert tensor is not None
            tensor = tensor.contiguous()
            layout = Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, learns=False)
            under_way = [self.control.send(layout.header(), rank, HEADER_TAG) for rank in others]
            under_way += [self.wire.send(tensor, rank, OUTPUT_TAG) for rank in others]
            for each in under_way:
                each.wait()
            return tensor
        header = Layout((), (), torch.float32, learns=False).header()
        self.control.receive(header, source, HEADER_TAG).wait()
        layout = layout_of(header)
        tensor = torch.empty(layout.shape, dtype=layout.dtype, device=device)
        self.wire.receive(tensor, source, OUTPUT_TAG).wait()
        return tensor

    def abort(self) -> None:
        """Close all connections, so that everybody's waits end."""
        self.control.abort()
        self.wire.abort()


def meet(process_group: dist.ProcessGroup | None, device: torch.device) -> Meeting | None:
    """Make groups of a group's ranks: a collective of them. None where this process is alone."""
    if not dist.is_initialized() or dist.get_world_size(process_group) == 1:
        return None
    timeout = timeout_of(process_group)
    group = own_group(process_group, "gloo", timeout)
    control = GlooWire(group, timeout)
    return Meeting(group.rank(), group.size(), group, control, control, Board(group))


def timeout_of(process_group: dist.ProcessGroup | None) -> timedelta:
    """Return how long a message of a group may take."""
    group: Any = process_group or dist.group.WORLD
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout
