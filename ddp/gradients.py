"""The gradients of one bucket, side by side in one flat tensor: each parameter's `.grad` is a view of its part.

    flat     | head.weight | head.bias | block2.mlp.down.weight | ...
    .grad      view          view        view

An optimizer that sets gradients to None lets the next backward make new ones, which are copied to their parts as they
become ready: that costs less than to fill the views with zeros and to add to them, and the division by the number of
ranks goes along with the copy. On a CPU the copy is still the dearest part of a bucket (5 of 60 ms of VGG-11's backward
with two samples), so a large gradient that has a bucket for itself is not copied: what autograd has made is sent. NCCL
needs no flat tensor at all (`LooseGradients`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from muster.ddp.buckets import ALONE_BYTES, Size, plan_buckets

Named = Sequence[tuple[str, nn.Parameter]]
UNSHARED: Final = 2  # owners of a gradient's memory when nobody else has it: `.grad`, and who counts them


class Slot:
    """One parameter's part of a bucket."""

    __slots__ = ("address", "bucket", "earlier", "name", "parameter", "ready", "view")

    def __init__(self, bucket: "Bucket", name: str, parameter: nn.Parameter, view: Tensor) -> None:
        self.bucket = bucket
        self.name = name
        self.parameter = parameter
        self.view = view  # of the flat tensor, with the parameter's own shape and strides
        self.address = view.data_ptr()
        self.ready = False  # True: the gradient of this synchronization has come
        self.earlier = False  # True: one came in a virtual shard before this one

    def holds(self, gradient: Tensor) -> bool:
        """True when a gradient lies in the bucket; it may be the view and yet not, if its `.data` was set."""
        return gradient is self.view and gradient.data_ptr() == self.address


class Bucket(ABC):
    """What a reducer launches as one: gradients of some parameters, which become ready one by one.

        take          a gradient is ready: put it where it is sent from; not of a bucket that `wants_batches`
        fill_missing  the backward is over: some gradients will not come
        take_all      all are there, and the bucket `wants_batches`
        close_shard   instead of a launch: what is there is the gradients of one virtual shard
        reset         the mean is there, or was given up: wait for all gradients anew

    A way to the mean (`ddp/means.py`, `zero/scatter.py`) knows the kind of bucket that it is given, and takes what is
    sent from it. Which rank has how many gradients ready is its own: buckets of all ranks have the same parameters.
    """

    held = False  # True: not launched before it is released
    wants_batches = False  # True: its gradients are taken as one, when the last is there
    message_bytes: int

    def __init__(self, number: int, named: Named, views: Sequence[Tensor] | None = None) -> None:
        self.number = number  # in the order of launches
        views = [parameter for _, parameter in named] if views is None else views
        self.slots = [Slot(self, name, parameter, view) for (name, parameter), view in zip(named, views, strict=True)]
        self.closed: list[Tensor] = []  # the gradients of virtual shards before this one, as flat tensors
        self.waiting = len(self.slots)  # for as many gradients

    def take(self, slot: Slot, scale: Tensor | None) -> None:  # noqa: B027 - some leave gradients where they are
        """Take a parameter's gradient, times `scale`."""

    def take_all(self, scale: Tensor | None) -> None:  # noqa: B027 - some take gradients one by one
        """Take all gradients at once, as `take` does each."""

    @abstractmethod
    def fill_missing(self, scale: Tensor | None) -> list[str]:
        """Take what has not come in this synchronization: older gradients as they are, none as zeros.

        Returns the names of the parameters that have none at all, in earlier virtual shards neither.
        """

    def close_shard(self) -> None:
        """Keep the gradients as those of a virtual shard, and begin the next one without any."""
        without = self.fill_missing(None)
        self.closed.append(self._shard())
        for slot in self.slots:
            slot.earlier = slot.name not in without
            slot.parameter.grad = None

    def _shard(self) -> Tensor:
        """Return the gradients as a flat tensor that no later one is written to."""
        raise NotImplementedError  # only buckets with a flat tensor can be summed exactly

    def reset(self) -> None:
        """Wait for all gradients anew."""
        self.waiting, self.closed = len(self.slots), []
        for slot in self.slots:
            slot.ready = slot.earlier = False


class FlatGradients(Bucket):
    """One flat tensor and the parameters whose gradients lie in it, all of one type on one device.

    With `alone` it has one parameter, and no tensor of its own: `flat` is the gradient, from when it is taken on.
    `offsets` and `elements` say where each begins, and how long the tensor is, if not simply one behind the other;
    `flat` is the tensor, if it shall be a certain one.
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
        if message not in (None, like.dtype) and not like.is_complex():  # half of a complex number would be lost
            self._cast = torch.zeros(elements, dtype=message, device=like.device)
        self.message_bytes = elements * (like if self._cast is None else self._cast).element_size()
        self.wants_batches = like.is_cuda  # on a GPU one kernel copies all of a bucket's gradients

    @property
    def message(self) -> Tensor:
        """What is sent: the gradients themselves, or their cast."""
        return self.flat if self._cast is None else self._cast

    def take(self, slot: Slot, scale: Tensor | None) -> None:
        """Put a parameter's gradient in its place, times `scale`, and make it a view of that place."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if slot.holds(gradient):  # added to what had been there
            if scale is not None:
                gradient.mul_(scale)
            return
        refuse_sparse(slot.name, gradient)
        if gradient.requires_grad:  # of a backward with create_graph: means have no graph
            gradient = gradient.detach().clone()
        if self.alone:
            self._take_over(slot.parameter, gradient, scale)
            return
        self._mend(slot)
        if scale is not None:
            torch.mul(gradient, scale, out=slot.view)  # a tensor's product costs 1.2 us, a number's 3.1
        else:
            slot.view.copy_(gradient)
        slot.parameter.grad = slot.view

    def _mend(self, slot: Slot) -> None:
        """Give a slot its view anew if somebody gave the view other memory."""
        if slot.view.data_ptr() != slot.address:
            start = (slot.address - self.flat.data_ptr()) // self.flat.element_size()
            part = self.flat[start : start + slot.parameter.numel()]
            slot.view = _shaped_as(slot.parameter, part)

    def _take_over(self, parameter: nn.Parameter, gradient: Tensor, scale: Tensor | None) -> None:
        """Make the gradient itself what is sent; one that lies otherwise than its parameter, or shared, is copied."""
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
        """Give a parameter zeros for a gradient."""
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
        if self.alone:  # the gradient belongs to the parameter alone now, and is freed when that lets it go
            self.flat = self._nothing


class LooseGradients(Bucket):
    """The gradients of one bucket where autograd has made them: launched together, in place, without a flat tensor.

    NCCL sums many tensors in one launch, so there is nothing to copy for; `.grad` is what is sent.
    """

    wants_batches = True

    def __init__(self, number: int, named: Named) -> None:
        super().__init__(number, named)
        self.tensors: list[Tensor] = []  # what is sent, from the launch to the end of a synchronization
        self.message_bytes = sum(parameter.nbytes for _, parameter in named)

    def take_all(self, scale: Tensor | None) -> None:
        """List the gradients; one that cannot be changed in place, or is not in one piece, is copied."""
        assert scale is None, "what is sent in place is divided by who sums"
        self.tensors = [_own(slot) for slot in self.slots]

    def fill_missing(self, scale: Tensor | None) -> list[str]:
        """Give zeros to parameters that have no gradient; return their names."""
        without = [slot for slot in self.slots if not slot.ready and slot.parameter.grad is None]
        for slot in without:
            slot.parameter.grad = torch.zeros_like(slot.parameter)
        return [slot.name for slot in without]

    def reset(self) -> None:
        super().reset()
        self.tensors = []


def deal(named: Named, bucket_size_mb: float | None, *, alone: bool = True) -> list[Named]:
    """Deal parameters to buckets by the sizes of their gradients (`plan_buckets`), in the order of launches.

    With `alone`, a large gradient on a CPU has a bucket for itself, so that it need not be copied to travel.
    """
    kinds = [(each.dtype, each.device, each.requires_grad) for _, each in named]
    sizes = [Size(each.numel(), each.itemsize, kind) for (_, each), kind in zip(named, kinds, strict=True)]
    large = ALONE_BYTES if alone and not any(each.is_cuda for _, each in named) else None
    return [[named[place] for place in places] for places in plan_buckets(sizes, bucket_size_mb, large)]


def travels_alone(parameters: Sequence[nn.Parameter]) -> bool:
    """True for a bucket of one gradient whose copy is worth to be saved: large, on a CPU, without gaps."""
    first = parameters[0]
    return len(parameters) == 1 and not first.is_cuda and first.nbytes >= ALONE_BYTES and is_dense(first)


def _own(slot: Slot) -> Tensor:
    """Return a parameter's gradient as dense memory that nobody else reads: autograd may share what it has made."""
    gradient = slot.parameter.grad
    assert gradient is not None
    refuse_sparse(slot.name, gradient)
    if owners(gradient) > UNSHARED or not (gradient.is_contiguous() or is_dense(gradient)):
        gradient = slot.parameter.grad = torch.empty_like(slot.parameter).copy_(gradient)
    return gradient


def refuse_sparse(name: str, gradient: Tensor) -> None:
    if gradient.is_sparse:
        raise RuntimeError(
            f"{name}: its gradient is sparse, only dense ones are averaged; build the layer with sparse=False"
        )


def _shaped_as(parameter: Tensor, part: Tensor) -> Tensor:
    """View a flat part with a parameter's shape, and with its strides where they leave no gaps."""
    if not is_dense(parameter):
        return part.view(parameter.shape)
    return part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """True when a tensor's elements, in some order of its axes, lie one after another."""
    dense = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != dense:
            return False
        dense *= size
    return True


def owners(gradient: Tensor) -> int:
    """Count who holds the memory of a gradient, the one who asks too."""
    return int(torch._C._storage_Use_Count(gradient.untyped_storage()._cdata))
