"""Buckets of gradients. Usually a bucket is one flat tensor, and each parameter's `.grad` is a view of a part of it.

    flat     | head.weight | head.bias | block2.mlp.down.weight | ...
    .grad      view          view        view

If the optimizer sets gradients to None, the next backward allocates new ones, which are copied into the flat tensor as
they become ready. This costs less than filling the views with zeros and adding to them, and the copy also divides by
the number of ranks. On a CPU the copy is still the most expensive part of a bucket (5 of 60 ms of VGG-11's backward
with two samples). So a large gradient gets its own bucket and is sent without a copy. With NCCL nothing is copied
(`LooseGradients` has no flat tensor).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from muster.ddp.buckets import ALONE_BYTES, GradientSize, plan_buckets

Named = Sequence[tuple[str, nn.Parameter]]
UNSHARED: Final = 2  # references to an unshared gradient: `.grad`, and the variable passed to `owners`


class Slot:
    """One parameter's part of a bucket."""

    __slots__ = ("address", "bucket", "earlier", "name", "none", "parameter", "ready", "view")

    def __init__(self, bucket: "Bucket", name: str, parameter: nn.Parameter, view: Tensor) -> None:
        self.bucket = bucket
        self.name = name
        self.parameter = parameter
        self.view = view  # a view of the flat tensor, with the parameter's shape and strides
        self.address = view.data_ptr()
        self.ready = False  # True: the gradient of this synchronization is ready
        self.none = False  # True: the backward has passed the parameter, but returned None as its gradient
        self.earlier = False  # True: an earlier virtual shard has a gradient

    def holds(self, gradient: Tensor) -> bool:
        """Return whether a gradient is the slot's view and still in the bucket.

        Setting `.data` moves a gradient out of the bucket.
        """
        return gradient is self.view and gradient.data_ptr() == self.address


class Bucket(ABC):
    """A set of gradients that a reducer launches together. They become ready one by one.

        take          a gradient is ready: copy it into the bucket; not called if the bucket `wants_batches`
        fill_missing  the backward is over: fill in gradients that were not computed
        take_all      all gradients are ready, and the bucket `wants_batches`: copy them at once
        close_shard   instead of a launch: set the gradients aside as one virtual shard
        reset         the mean was computed or abandoned: mark all gradients as not ready

    Each averaging class (`ddp/means.py`, `zero/scatter.py`) handles one class of buckets and sends their messages. The
    number of ready gradients may differ between ranks, but a bucket has the same parameters on all ranks.
    """

    held = False  # True: the bucket is not launched before `release`
    wants_batches = False  # True: `take_all` replaces `take`, and is called when the last gradient is ready
    message_bytes: int

    def __init__(self, number: int, named: Named, views: Sequence[Tensor] | None = None) -> None:
        self.number = number  # in the order of launches
        views = [parameter for _, parameter in named] if views is None else views
        self.slots = [Slot(self, name, parameter, view) for (name, parameter), view in zip(named, views, strict=True)]
        self.closed: list[Tensor] = []  # the gradients of earlier virtual shards, as flat tensors
        self.waiting = len(self.slots)  # number of gradients that are not ready

    def take(self, slot: Slot, scale: Tensor | None) -> None:  # noqa: B027 - not every bucket copies gradients
        """Copy a parameter's gradient into the bucket, multiplied by `scale`."""

    def take_all(self, scale: Tensor | None) -> None:  # noqa: B027 - only for buckets that want batches
        """Copy all gradients into the bucket at once, multiplied by `scale`."""

    @abstractmethod
    def fill_missing(self, scale: Tensor | None) -> list[str]:
        """For each gradient that is not ready, use the parameter's accumulated `.grad`, or zeros if it is None.

        Returns the names of the parameters that have no gradient here or in an earlier virtual shard.
        """

    def mean_of(self, slot: Slot) -> Tensor | None:
        """Return the mean gradient of a parameter, or this rank's part of it, if there is one."""
        return slot.parameter.grad

    def close_shard(self) -> None:
        """Set the gradients aside as a virtual shard, and begin the next shard without gradients."""
        without = self.fill_missing(None)
        self.closed.append(self._shard())
        for slot in self.slots:
            slot.earlier = slot.name not in without
            slot.parameter.grad = None

    def _shard(self) -> Tensor:
        """Return the gradients as a flat tensor that later gradients do not overwrite."""
        raise NotImplementedError  # only buckets with a flat tensor can be summed exactly

    def reset(self) -> None:
        """Mark all gradients as not ready, and drop the virtual shards."""
        self.waiting, self.closed = len(self.slots), []
        for slot in self.slots:
            slot.ready = slot.none = slot.earlier = False


class FlatGradients(Bucket):
    """A bucket whose gradients lie in one flat tensor, and have the same dtype and device.

    With `alone` the bucket has one parameter, whose gradient itself serves as the flat tensor. `offsets` are the
    starts of the gradients in the flat tensor, and `elements` is its length; by default there are no gaps. `flat` is an
    existing tensor to use instead of a new one.
    """

    def __init__(
        self,
        number: int,
        named: Named,
        message: torch.dtype | None,
        *,
        alone: bool,
        offsets: Sequence[int] | None = None,
        elements: int | None = None,
        flat: Tensor | None = None,
    ) -> None:
        like = named[0][1]
        if offsets is None or elements is None:
            sizes = [parameter.numel() for _, parameter in named]
            offsets, elements = [sum(sizes[:place]) for place in range(len(sizes))], sum(sizes)
        self.alone = alone
        self._nothing = torch.empty(0, dtype=like.dtype, device=like.device)
        if flat is None:
            flat = self._nothing if alone else torch.zeros(elements, dtype=like.dtype, device=like.device)
        self.flat = flat
        parts = [flat[start : start + each.numel()] for (_, each), start in zip(named, offsets, strict=True)]
        if not alone:
            parts = [_shaped_as(parameter, part) for (_, parameter), part in zip(named, parts, strict=True)]
        super().__init__(number, named, parts)
        self._cast = None
        if message not in (None, like.dtype) and not like.is_complex():  # a cast would drop the imaginary part
            self._cast = torch.zeros(elements, dtype=message, device=like.device)
        self.message_bytes = elements * (like if self._cast is None else self._cast).element_size()
        self.wants_batches = like.is_cuda  # on a GPU one kernel copies all of a bucket's gradients

    @property
    def message(self) -> Tensor:
        """The tensor to send: the flat tensor, or its copy in the communication dtype."""
        return self.flat if self._cast is None else self._cast

    def take(self, slot: Slot, scale: Tensor | None) -> None:
        """Copy a gradient, multiplied by `scale`, to its part of the flat tensor, and make `.grad` a view of that part.

        With `alone`, scale the gradient in place instead.
        """
        gradient = slot.parameter.grad
        assert gradient is not None
        if slot.holds(gradient):  # here autograd has accumulated into the view
            if scale is not None:
                gradient.mul_(scale)
            return
        refuse_sparse(slot.name, gradient)
        if gradient.requires_grad:  # the gradient is from a backward with create_graph; the mean has no graph
            gradient = gradient.detach().clone()
        if self.alone:
            self._take_over(slot.parameter, gradient, scale)
            return
        self._mend(slot)
        if scale is not None:
            torch.mul(gradient, scale, out=slot.view)  # multiplying by a tensor takes 1.2 us, by a number 3.1 us
        else:
            slot.view.copy_(gradient)
        slot.parameter.grad = slot.view

    def _mend(self, slot: Slot) -> None:
        """Create the view of a slot again if the view's `.data` was set."""
        if slot.view.data_ptr() != slot.address:
            start = (slot.address - self.flat.data_ptr()) // self.flat.element_size()
            part = self.flat[start : start + slot.parameter.numel()]
            slot.view = _shaped_as(slot.parameter, part)

    def _take_over(self, parameter: nn.Parameter, gradient: Tensor, scale: Tensor | None) -> None:
        """Use the gradient itself as the message.

        Copy it first if it is shared, or if its strides are not those of its parameter.
        """
        self.flat = self._nothing
        if gradient.stride() != parameter.stride() or owners(gradient) > UNSHARED:
            gradient = parameter.grad = torch.empty_like(parameter).copy_(gradient)
        if scale is not None:
            gradient.mul_(scale)
        self.flat = gradient.as_strided((gradient.numel(),), (1,))

    def take_all(self, scale: Tensor | None) -> None:
        pairs = [(slot, slot.parameter.grad) for slot in self.slots]
        strangers = [(slot, each) for slot, each in pairs if each is not None and not slot.holds(each)]
        if strangers:
            for slot, _ in strangers:
                self._mend(slot)
            torch._foreach_copy_([slot.view for slot, _ in strangers], [each for _, each in strangers])
            for slot, _ in strangers:
                slot.parameter.grad = slot.view
        if scale is not None:
            self.flat.mul_(scale)

    def fill_missing(self, scale: Tensor | None) -> list[str]:
        without = []
        for slot in self.slots:
            if slot.ready:
                continue
            if slot.parameter.grad is None:
                without += [] if slot.earlier else [slot.name]
                self._fill(slot)
            elif not self.wants_batches:
                self.take(slot, scale)
        return without

    def _fill(self, slot: Slot) -> None:
        """Set a parameter's gradient to zeros."""
        if self.alone:
            slot.parameter.grad = torch.zeros_like(slot.parameter)
            self._take_over(slot.parameter, slot.parameter.grad, None)
            return
        slot.view.zero_()
        slot.parameter.grad = slot.view

    def _shard(self) -> Tensor:
        if self.wants_batches:
            self.take_all(None)
        return self.flat if self.alone else self.flat.clone()

    def reset(self) -> None:
        super().reset()
        if self.alone:  # so that the gradient is freed when `.grad` is set to None
            self.flat = self._nothing


class LooseGradients(Bucket):
    """A bucket without a flat tensor. Its gradients are averaged in place, where autograd has allocated them.

    NCCL reduces many tensors in one launch, so each `.grad` is sent without a copy.
    """

    wants_batches = True

    def __init__(self, number: int, named: Named) -> None:
        super().__init__(number, named)
        self.tensors: list[Tensor] = []  # the tensors to send; empty before the launch
        self.message_bytes = sum(parameter.nbytes for _, parameter in named)

    def take_all(self, scale: Tensor | None) -> None:
        """List the gradients to send. Gradients that are shared or not dense are copied first."""
        assert scale is None, "NCCL divides gradients that are averaged in place, so they must not be scaled before"
        self.tensors = [_own(slot) for slot in self.slots]

    def fill_missing(self, scale: Tensor | None) -> list[str]:
        """Set missing gradients to zeros; return the names of their parameters."""
        without = [slot for slot in self.slots if not slot.ready and slot.parameter.grad is None]
        for slot in without:
            slot.parameter.grad = torch.zeros_like(slot.parameter)
        return [slot.name for slot in without]

    def reset(self) -> None:
        super().reset()
        self.tensors = []


def deal(named: Named, bucket_size_mb: float | None, *, alone: bool = True) -> list[Named]:
    """Assign parameters to buckets by the sizes of their gradients (`plan_buckets`), in the order of launches.

    With `alone`, a large gradient on a CPU gets its own bucket, so that it is sent without a copy.
    """
    kinds = [(each.dtype, each.device, each.requires_grad) for _, each in named]
    sizes = [GradientSize(each.numel(), each.itemsize, kind) for (_, each), kind in zip(named, kinds, strict=True)]
    large = ALONE_BYTES if alone and not any(each.is_cuda for _, each in named) else None
    return [[named[place] for place in places] for places in plan_buckets(sizes, bucket_size_mb, large)]


def travels_alone(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether a bucket's only gradient should be sent without a copy: it is large, on a CPU, and dense."""
    first = parameters[0]
    return len(parameters) == 1 and not first.is_cuda and first.nbytes >= ALONE_BYTES and is_dense(first)


def _own(slot: Slot) -> Tensor:
    """Return a parameter's gradient, copied first if it is not dense or autograd shares its memory."""
    gradient = slot.parameter.grad
    assert gradient is not None
    refuse_sparse(slot.name, gradient)
    if owners(gradient) > UNSHARED or not (gradient.is_contiguous() or is_dense(gradient)):
        gradient = slot.parameter.grad = torch.empty_like(slot.parameter).copy_(gradient)
    return gradient


def refuse_sparse(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise RuntimeError(
            f"{name}: its gradient is sparse, but only dense gradients are averaged; build the layer with sparse=False"
        )


def _shaped_as(parameter: Tensor, part: Tensor) -> Tensor:
    """View a flat part with a parameter's shape, and with its strides if they leave no gaps."""
    if not is_dense(parameter):
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are contiguous for some order of its dimensions."""
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != dense:
            return False
        dense *= size
    return True


def owners(gradient: Tensor) -> int:
    """Return the number of references to a gradient's memory, including the caller's."""
    return int(torch._C._storage_Use_Count(gradient.untyped_storage()._cdata))
