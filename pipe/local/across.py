"""Tensors from one device to another while both devices compute.

PyTorch makes a copy between two GPUs on the sender's current stream, and lets both GPUs' current streams wait for each
other. Two streams beside the computing ones take its place, so a copy waits for the tensor alone, and only who reads
the copy waits for it; the same for its gradient, which goes back over the same two streams.

    sender     compute    F0  F1  F2
               beside         0   1   2          an event after each F says that it may leave
    receiver   beside         0   1   2
               compute            F0  F1  F2
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from muster.pipe.local.nested import mapped, tensors_of

Ready = Mapping[torch.device, torch.cuda.Event]  # by device: after it, everything that was made there is ready


@dataclass
class Streams:
    """The streams of one thread's copies, a pair for every sender that it has met."""

    device: torch.device
    pairs: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = field(default_factory=dict)

    def fetch(self, value: Any, ready: Ready) -> Any:
        """Return the value with all tensors on this device; the calling thread's current stream has waited for them."""
        return mapped(value, lambda tensor: self._fetch(tensor, ready))

    def _fetch(self, tensor: Tensor, ready: Ready) -> Tensor:
        if tensor.device == self.device:
            return tensor
        if tensor.device not in ready or self.device.type != "cuda":
            return tensor.to(self.device)  # in the order of the streams that the caller sees
        if tensor.device not in self.pairs:
            self.pairs[tensor.device] = _stream(tensor.device), _stream(self.device)
        there, here = self.pairs[tensor.device]
        there.wait_event(ready[tensor.device])
        computing = torch.cuda.current_stream(self.device)
        users = torch.cuda.current_stream(tensor.device), computing
        # What is current on the copy's device is what the engine takes for this node's stream: gradients come there.
        with torch.cuda.stream(here), torch.cuda.stream(there):
            copy: Tensor = _Across.apply(tensor, (there, here), users)  # type: ignore[no-untyped-call]
        here.wait_stream(there)
        computing.wait_stream(here)
        return copy


class _Across(torch.autograd.Function):
    """Copies to another GPU over two streams; its gradient comes back over the same."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream],
        users: tuple[torch.cuda.Stream, torch.cuda.Stream],
    ) -> Tensor:
        ctx.streams, ctx.users = streams, users
        copy = tensor.to(streams[1].device, non_blocking=True)
        # Memory must not be given to others before these streams are done with it.
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
    """Return the calling thread's current streams of GPUs, and of those that hold the value's tensors."""
    found = {device for device in (*devices, *(each.device for each in tensors_of(value))) if device.type == "cuda"}
    return [torch.cuda.current_stream(device) for device in sorted(found, key=lambda device: device.index)]


def events_now(value: Any) -> dict[torch.device, torch.cuda.Event]:
    """Record on the calling thread's current streams that the value's tensors are ready."""
    return {stream.device: stream.record_event() for stream in streams_now(value)}
