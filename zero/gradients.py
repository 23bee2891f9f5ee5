"""Buckets that collect whole gradients, and deliver this rank's shard of their mean.

    KeptGradients      stage 1      gradients are views of a flat tensor that is always allocated, as in `ddp`
    PassingGradients   stages 2, 3  gradients stay where autograd allocated them until the bucket is complete; then they
                                    are packed into a flat tensor, which exists until they have been summed

Both have the layout of the flat parameters, so that shards of gradients match shards of parameters. After a
synchronization no parameter has a
`.grad`: the mean is in `FlatParameters.grad`, and the next synchronization adds to it.
"""

import torch
from torch import Tensor

from muster.ddp.gradients import UNSHARED, Bucket, FlatGradients, Slot, owners, refuse_sparse, travels_alone
from muster.ddp.means import Wait
from muster.zero.absent import as_it_is
from muster.zero.flat import FlatParameters
from muster.zero.shared_memory import at_once


class KeptGradients(FlatGradients):
    """Whole gradients in a flat tensor that is always allocated."""

    def __init__(
        self,
        number: int,
        flat_parameter: FlatParameters,
        message: torch.dtype | None,
        *,
        flat: Tensor | None = None,
    ) -> None:
        self.flat_parameter = flat_parameter
        self.before_writing: Wait = at_once  # wait until no rank reads the flat tensor
        layout = flat_parameter.layout
        alone = flat is None and travels_alone(flat_parameter.parameters) and not layout.gaps
        super().__init__(
            number,
            flat_parameter.named,
            message,
            alone=alone,
            offsets=layout.offsets,
            elements=layout.length,
            flat=flat,
        )
        self._used: set[str] = set()
        self._own_gaps = [
            (max(start, flat_parameter.begin), min(stop, flat_parameter.end))
            for start, stop in layout.gaps
            if start < flat_parameter.end and stop > flat_parameter.begin
        ]

    def take(self, slot: Slot, scale: Tensor | None) -> None:
        """Copy a gradient into the flat tensor. If a mean from an earlier backward is still there, save it first."""
        self._clear()
        super().take(slot, scale)

    def take_all(self, scale: Tensor | None) -> None:
        self._clear()
        super().take_all(scale)

    def fill_missing(self, scale: Tensor | None) -> list[str]:
        self._clear()
        return _never_used(self, super().fill_missing(scale))

    def pack(self, scale: float) -> Tensor:
        """Return the message: the flat tensor, or a cast copy of it. The gradients were scaled before."""
        for start, stop in self._own_gaps:  # clipping by an infinite or NaN norm also sets the gaps to NaN
            self.flat[start:stop].zero_()
        if self.message is not self.flat:
            self.message.copy_(self.flat)
        return self.message

    def deliver(self, mean: Tensor) -> None:
        """Add this rank's part of the mean to the shard's gradient, and drop the whole gradients."""
        self.flat_parameter.add_gradient(mean)
        for slot in self.slots:
            slot.parameter.grad = None

    def mean_of(self, slot: Slot) -> Tensor | None:
        return _part_of(self.flat_parameter, slot)

    def _clear(self) -> None:
        """Wait until other ranks have read the flat tensor.

        If the flat tensor still contains a mean, move the mean to other memory.
        """
        self.before_writing()
        mean = self.flat_parameter.grad
        if mean is not None and mean.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr():
            self.flat_parameter.grad = mean.clone()


class PassingGradients(Bucket):
    """Whole gradients that stay where autograd allocated them until the bucket is packed and sent."""

    def __init__(
        self, number: int, flat_parameter: FlatParameters, message: torch.dtype | None, *, held: bool = False
    ) -> None:
        self.flat_parameter = flat_parameter
        with as_it_is():
            super().__init__(number, flat_parameter.named)
        self.flat: Tensor | None = None
        self.held = self._held = held  # True: the bucket is not launched before `release`
        self._used: set[str] = set()
        self._type = message or flat_parameter.dtype
        self.message_bytes = flat_parameter.layout.length * self._type.itemsize

    def pack(self, scale: float) -> Tensor:
        """Pack the gradients, multiplied by `scale`, into a message, and drop them. Return the message.

        The gradient of a bucket with one parameter is sent without a copy, if nothing else refers to it.
        """
        with as_it_is():
            return self._pack(scale)

    def _pack(self, scale: float) -> Tensor:
        if (only := self._only()) is not None:
            self.flat = only if scale == 1.0 else only.mul_(scale)
        else:
            self.flat = torch.empty(
                self.flat_parameter.layout.length, dtype=self._type, device=self.flat_parameter.device
            )
            for start, stop in self.flat_parameter.layout.gaps:  # the optimizer and norms also read the gaps
                self.flat[start:stop].zero_()
            self._copy(scale)
        for slot in self.slots:
            slot.parameter.grad = None
        return self.flat

    def _only(self) -> Tensor | None:
        """Return the bucket's only gradient as a flat tensor, if it may be changed in place and needs no copy."""
        if len(self.slots) > 1 or self.flat_parameter.layout.gaps:
            return None
        gradient = self.slots[0].parameter.grad
        assert gradient is not None
        usable = gradient.is_contiguous() and not gradient.requires_grad and gradient.dtype == self._type
        return gradient.view(-1) if usable and owners(gradient) <= UNSHARED else None

    def _copy(self, scale: float) -> None:
        assert self.flat is not None
        views, gradients = [], []
        for slot, offset, size in zip(
            self.slots, self.flat_parameter.layout.offsets, self.flat_parameter.layout.sizes, strict=True
        ):
            gradient = slot.parameter.grad
            assert gradient is not None
            refuse_sparse(slot.name, gradient)
            views.append(self.flat[offset : offset + size].view(slot.parameter.shape))
            gradients.append(gradient.detach())
        if scale == 1.0 or self.flat.is_cuda or self.flat.itemsize > self.flat_parameter.dtype.itemsize:
            torch._foreach_copy_(views, gradients)
            if scale != 1.0:
                self.flat.mul_(scale)
            return
        factor = torch.tensor(scale, dtype=torch.float64)  # multiplying by a tensor takes 1.2 us, by a number 3.1 us
        for view, gradient in zip(views, gradients, strict=True):
            torch.mul(gradient, factor, out=view)

    def fill_missing(self, scale: Tensor | None) -> list[str]:
        """Fill in zeros for parameters without a gradient. Return the names of parameters that never had a gradient."""
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
        """Add this rank's part of the mean, in the parameters' dtype, to the shard's gradient. Free the message."""
        self.flat_parameter.add_gradient(mean.to(self.flat_parameter.dtype, copy=self.flat_parameter.layout.ranks > 1))
        self.flat = None

    def mean_of(self, slot: Slot) -> Tensor | None:
        return _part_of(self.flat_parameter, slot)

    def reset(self) -> None:
        super().reset()
        self.flat, self.held = None, self._held


Gradients = KeptGradients | PassingGradients


def _part_of(flat_parameter: FlatParameters, slot: Slot) -> Tensor | None:
    """Return this rank's part of a parameter's mean gradient, or None if the shard has no part of the parameter."""
    if flat_parameter.grad is not None:
        for at in flat_parameter.slices:
            if flat_parameter.parameters[at.tensor] is slot.parameter:
                return flat_parameter.of(flat_parameter.grad, at)
    return None


def _never_used(bucket: Gradients, without: list[str]) -> list[str]:
    """Return the names in `without` for which the shard also has no gradient from an earlier synchronization."""
    if bucket.flat_parameter.grad is None:
        bucket._used = set()
    never = [name for name in without if name not in bucket._used]
    bucket._used.update({slot.name for slot in bucket.slots}.difference(never))
    return never
