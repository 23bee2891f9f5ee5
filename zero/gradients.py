"""The gradients of one bucket: whole gradients go in, this rank's shard of the mean comes out.

    KeptGradients      stage 1      gradients are views of a flat tensor that is always allocated, as in `ddp`
    PassingGradients   stages 2, 3  gradients stay where autograd made them until the bucket is complete; then they
                                    are packed into a flat tensor, which exists until their sum has been taken

Both have the layout of the flat parameters, so that their shards match. Afterwards no parameter has a `.grad`: the mean
is in `FlatParameters.grad`, and the next synchronization adds to it.
"""

import torch
from torch import Tensor

from muster.ddp.gradients import UNSHARED, Bucket, FlatGradients, Slot, owners, refuse_sparse, travels_alone
from muster.ddp.means import Wait
from muster.zero.absent import as_it_is
from muster.zero.flat import FlatParameters
from muster.zero.neighbours import at_once


class KeptGradients(FlatGradients):
    """Whole gradients in a flat tensor of their own."""

    def __init__(
        self,
        number: int,
        home: FlatParameters,
        message: torch.dtype | None,
        *,
        flat: Tensor | None = None,
    ) -> None:
        self.home = home
        self.before_writing: Wait = at_once  # waits until no rank reads the flat tensor any more
        layout = home.layout
        alone = flat is None and travels_alone(home.parameters) and not layout.gaps
        super().__init__(
            number, home.named, message, alone=alone, offsets=layout.offsets, elements=layout.length, flat=flat
        )
        self._used: set[str] = set()
        self._own_gaps = [
            (max(start, home.begin), min(stop, home.end))
            for start, stop in layout.gaps
            if start < home.end and stop > home.begin
        ]

    def take(self, slot: Slot, scale: Tensor | None) -> None:
        """Move a gradient to its place, which may still hold the mean of an earlier synchronization."""
        self._clear()
        super().take(slot, scale)

    def take_all(self, scale: Tensor | None) -> None:
        self._clear()
        super().take_all(scale)

    def fill_missing(self, scale: Tensor | None) -> list[str]:
        self._clear()
        return _never_used(self, super().fill_missing(scale))

    def pack(self, scale: float) -> Tensor:
        """Return the message. Gradients were already scaled; if the message has another type, they are cast."""
        for start, stop in self._own_gaps:  # clipping by a norm that is not finite has set them to NaN, too
            self.flat[start:stop].zero_()
        if self.message is not self.flat:
            self.message.copy_(self.flat)
        return self.message

    def deliver(self, mean: Tensor) -> None:
        """Add this rank's part of the mean to its shard. The other ranks have their parts."""
        self.home.add_gradient(mean)
        for slot in self.slots:
            slot.parameter.grad = None

    def _clear(self) -> None:
        """Wait until other ranks have finished reading, and move an unused mean out of the way."""
        self.before_writing()
        mean = self.home.grad
        if mean is not None and mean.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr():
            self.home.grad = mean.clone()


class PassingGradients(Bucket):
    """Gradients that stay where autograd made them, and are packed when the bucket is sent."""

    def __init__(self, number: int, home: FlatParameters, message: torch.dtype | None, *, held: bool = False) -> None:
        self.home = home
        with as_it_is():
            super().__init__(number, home.named)
        self.flat: Tensor | None = None
        self.held = self._held = held  # True: launched on `release`, not when all gradients are there
        self._used: set[str] = set()
        self._type = message or home.dtype
        self.message_bytes = home.layout.length * self._type.itemsize

    def pack(self, scale: float) -> Tensor:
        """Pack the gradients, times `scale`, and drop them; return the message.

        A bucket with a single large gradient is sent without a copy, if nothing else refers to it.
        """
        with as_it_is():
            return self._pack(scale)

    def _pack(self, scale: float) -> Tensor:
        if (only := self._only()) is not None:
            self.flat = only if scale == 1.0 else only.mul_(scale)
        else:
            self.flat = torch.empty(self.home.layout.length, dtype=self._type, device=self.home.device)
            for start, stop in self.home.layout.gaps:  # optimizer and norms read gaps, too
                self.flat[start:stop].zero_()
            self._copy(scale)
        for slot in self.slots:
            slot.parameter.grad = None
        return self.flat

    def _only(self) -> Tensor | None:
        """Return the bucket's only gradient as a flat tensor, if it may be changed in place and needs no copy."""
        if len(self.slots) > 1 or self.home.layout.gaps:
            return None
        gradient = self.slots[0].parameter.grad
        assert gradient is not None
        usable = gradient.is_contiguous() and not gradient.requires_grad and gradient.dtype == self._type
        return gradient.view(-1) if usable and owners(gradient) <= UNSHARED else None

    def _copy(self, scale: float) -> None:
        assert self.flat is not None
        views, gradients = [], []
        for slot, offset, size in zip(self.slots, self.home.layout.offsets, self.home.layout.sizes, strict=True):
            gradient = slot.parameter.grad
            assert gradient is not None
            refuse_sparse(slot.name, gradient)
            views.append(self.flat[offset : offset + size].view(slot.parameter.shape))
            gradients.append(gradient.detach())
        if scale == 1.0 or self.flat.is_cuda or self.flat.itemsize > self.home.dtype.itemsize:
            torch._foreach_copy_(views, gradients)
            if scale != 1.0:
                self.flat.mul_(scale)
            return
        factor = torch.tensor(scale, dtype=torch.float64)  # a product with a tensor takes 1.2 us, with a number 3.1
        for view, gradient in zip(views, gradients, strict=True):
            torch.mul(gradient, factor, out=view)

    def fill_missing(self, scale: Tensor | None) -> list[str]:
        """Fill in zeros for parameters without a gradient; return the names of those that never had one."""
        with as_it_is():
            without = [slot for slot in self.slots if not slot.ready and slot.parameter.grad is None]
            if self.flat is None:
                for slot in without:
                    slot.parameter.grad = torch.zeros_like(slot.parameter)
        return _never_used(self, [slot.name for slot in without if not slot.earlier])

    def _shard(self) -> Tensor:
        shard, self.flat = self.pack(1.0), None
        return shard

    def deliver(self, mean: Tensor) -> None:
        """Add this rank's part of the mean to its shard, in the parameters' type, and free the whole message."""
        self.home.add_gradient(mean.to(self.home.dtype, copy=self.home.layout.ranks > 1))
        self.flat = None

    def reset(self) -> None:
        super().reset()
        self.flat, self.held = None, self._held


Gradients = KeptGradients | PassingGradients


def _never_used(bucket: Gradients, without: list[str]) -> list[str]:
    """Leave out parameters whose gradient from an earlier synchronization is still in the shard."""
    if bucket.home.grad is None:
        bucket._used = set()
    never = [name for name in without if name not in bucket._used]
    bucket._used.update({slot.name for slot in bucket.slots}.difference(never))
    return never
