"""Copy tensors from one device to another while both devices compute.

PyTorch runs a copy between two GPUs on the sender's current stream, and makes the current streams of both GPUs wait for
each other. Here two extra streams do the copy: they wait only for the tensor, and only its consumer waits for the copy.
The gradient returns over the same two streams.

    sender     compute    F0  F1  F2
               extra          0   1   2          an event after each F allows its copy
    receiver   extra          0   1   2
               compute            F0  F1  F2
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muster.pipe.local.nested import mapped, tensors_of

Ready = Mapping[torch.device, torch.cuda.Event]  # by device: the event after which all tensors on the device are ready


@dataclass
class Streams:
    """The copy streams of one thread: a pair of streams for every sending device so far."""

    device: torch.device
    pairs: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = field(default_factory=dict)

    def fetch(self, value: Any, ready: Ready) -> Any:
        """Return the value with all tensors on this device. The calling thread's current stream waits for copies."""
        return mapped(value, lambda tensor: self._fetch(tensor, ready))

    def _fetch(self, tensor: Tensor, ready: Ready) -> Tensor:
        if tensor.device == self.device:
            return tensor
        if tensor.device not in ready or self.device.type != "cuda":
            return tensor.to(self.device)  # this copy runs on the caller's current streams
        if tensor.device not in self.pairs:
            self.pairs[tensor.device] = _stream(tensor.device), _stream(self.device)
        there, here = self.pairs[tensor.device]
        there.wait_event(ready[tensor.device])
        computing = torch.cuda.current_stream(self.device)
        users = torch.cuda.current_stream(tensor.device), computing
        # Autograd runs a node's backward on the stream of its forward, so gradients arrive on these streams.
        with torch.cuda.stream(here), torch.cuda.stream(there):
            copy: Tensor = _Across.apply(tensor, (there, here), users)  # type: ignore[no-untyped-call]
        here.wait_stream(there)
        computing.wait_stream(here)
        return copy


class _Across(torch.autograd.Function):
    """Copy to another GPU over two streams; the gradient is copied back over the same two streams."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        users: tuple[torch.cuda.Stream, torch.cuda.Stream],
    ) -> Tensor:
        ctx.streams, ctx.users = streams, users
        copy = tensor.to(streams[1].device, non_blocking=True)
        # The allocator must not reuse the memory before these streams have finished with it.
        tensor.record_stream(streams[0])
        copy.record_stream(users[1])
        return copy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (there, here), (maker, user) = ctx.streams, ctx.users
        with torch.cuda.stream(there), torch.cuda.stream(here):
            copy: Tensor = _Across.apply(gradients[0], (here, there), (user, maker))  # type: ignore[no-untyped-call]
        here.wait_stream(there)
        return copy, None, None


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def streams_now(value: Any, *devices: torch.device) -> list[torch.cuda.Stream]:
    """Return the calling thread's current streams on these devices and on those of the value's tensors."""
    found = {device for device in (*devices, *(each.device for each in tensors_of(value))) if device.type == "cuda"}
    return [torch.cuda.current_stream(device) for device in sorted(found, key=lambda device: device.index)]


def events_now(value: Any) -> dict[torch.device, torch.cuda.Event]:
    """Record events on the calling thread's current streams, after which the value's tensors are ready."""
    return {stream.device: stream.record_event() for stream in streams_now(value)}
