"""Parameters packed into one flat tensor; this rank owns one shard of it.

    full     | block1.up | block1.down | block1.norm |        each parameter's data is a view of its part
    shard           ^^^^^^^^^^^                               this rank's part, which its optimizer steps

In stages 1 and 2 the flat tensor always has memory, and the shard is a view of it, so the optimizer writes in place.
In stage 3 the shard has its own memory. The flat tensor's memory is allocated and freed (`take_memory`, `free`), while
views of it stay valid, including those that autograd has saved for the backward.

16-bit parameters may have a *master*: a float32 copy of the shard, which the optimizer steps instead. Stage 3 keeps
only the master. Before each gather, it rounds the master into the flat tensor.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.ddp.gradients import Named, is_dense
from muster.zero.absent import Leave, as_it_is, send, unsend
from muster.zero.layout import Layout, Slice

ALIGNMENT: Final = 64  # bytes, as in PyTorch's CPU allocator; NCCL needs only 16


@dataclass(frozen=True)
class ParameterRange:
    """Elements [start, stop) of a parameter, flattened row by row, or of its optimizer state under `key`.

    `tensor` contains these elements, and may be filled in place. A state with one number per parameter, such as a step
    count, has the shape (), and every rank with a part of the parameter has a copy. `answers` is True for the copy to
    save, which is on the rank with the first element. If `lent`, the tensor is a rounded copy of the master, which is
    outdated after the next step.
    """

    name: str
    key: str | None
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor
    answers: bool = True
    lent: bool = False


class FlatParameters:
    """Parameters of one dtype on one device, and this rank's shard of them.

    With `dtype`, float32 parameters are cast to that 16-bit dtype for computing, and `split` keeps their values as
    masters. Either all parameters are trainable, or none. The parameters become row-major views of one flat tensor,
    `full`. With `keeps_strides`, parameters that are not row-major keep their memory, and are copied to the flat tensor
    before a step and back after it. `grad` is this rank's shard of the mean gradient, or None.
    """

    def __init__(
        self, named: Named, *, rank: int, ranks: int, dtype: torch.dtype | None = None, keeps_strides: bool = False
    ) -> None:
        first = named[0][1]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [parameter.shape for _, parameter in named]
        self.stored_dtype, self.device = first.dtype, first.device  # the dtype in state dicts
        self.dtype = dtype if dtype is not None and first.dtype == torch.float32 else first.dtype
        self.trains = first.requires_grad
        self.keeps_strides = keeps_strides
        self.rank = rank
        sizes = tuple(parameter.numel() for _, parameter in named)
        self.layout = Layout(sizes, ranks, ALIGNMENT // self.dtype.itemsize)
        self.begin, self.end = self.layout.bounds(rank)
        self.slices = self.layout.slices(rank)
        self.full = torch.zeros(self.layout.length, dtype=self.dtype, device=self.device)
        self.views = self.views_of(self.full)
        self._master = self._unrounded() if self.is_cast else None  # until `split`
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views, strict=True):
                view.copy_(parameter)
                parameter.data = self._home_of(parameter, view)
        self._homes = [each.detach() for each in self.parameters]  # these keep the memory alive
        self._memory = [_memory_of(home) for home in self._homes]
        self._shard: Tensor | None = self.full[self.begin : self.end]
        self._lent: Tensor | None = None  # a rounded copy of the master, if the shard itself is not kept
        self.stepped = self._shard  # the tensor that the optimizer steps: the shard or its master
        self.grad: Tensor | None = None
        self.is_split = False  # True: the shard has its own memory
        self.is_whole = True  # False: the flat tensor currently has no memory

    def _home_of(self, parameter: Tensor, view: Tensor) -> Tensor:
        """Return the memory to use for a parameter: its view, or with `keeps_strides` memory with the same strides."""
        if not self.keeps_strides or not is_dense(parameter):
            return view
        if parameter.is_contiguous():  # the strides of dimensions of size 1 may still differ
            return view.as_strided(parameter.shape, parameter.stride(), view.storage_offset())
        return parameter.detach()

    @torch.no_grad()
    def copy_apart(self, *, back: bool) -> None:
        """Copy the parameters that are not in the flat tensor to it, or back."""
        full = self.full.untyped_storage()._cdata
        for parameter, view, (storage, *_) in zip(self.parameters, self.views, self._memory, strict=True):
            if storage != full:
                _ = parameter.copy_(view) if back else view.copy_(parameter)

    @property
    def shard(self) -> Tensor:
        """This rank's part.

        If only the master is kept, this is a rounded copy of the master, dropped at the next step.
        """
        if self._shard is not None:
            return self._shard
        if self._lent is None:
            self._lent = self.stepped.detach().to(self.dtype)
        return self._lent

    @property
    def is_cast(self) -> bool:
        """True if the parameters are stored in one dtype and used in computations in another."""
        return self.dtype != self.stored_dtype

    @torch.no_grad()
    def _unrounded(self) -> Tensor:
        """Return this rank's part of the parameters in the dtype that they had before casting."""
        whole = torch.zeros(self.layout.length, dtype=self.stored_dtype, device=self.device)
        for parameter, view in zip(self.parameters, self.views_of(whole), strict=True):
            view.copy_(parameter)
        return whole[self.begin : self.end].clone()

    @torch.no_grad()
    def load_unrounded(self, state_dict: Mapping[str, Any]) -> None:
        """Copy this rank's part of the values of a state dict into the masters, without rounding."""
        for at in self.slices:
            value = state_dict.get(self.names[at.tensor])
            if isinstance(value, Tensor):
                self.of(self.stepped, at).copy_(value.reshape(-1)[at.start : at.stop])
        self.write_back()

    def sent(self) -> Tensor:
        """Return this rank's part for a gather.

        If only the master is kept, round the master into the flat tensor first.
        """
        if self._shard is not None:
            return self._shard
        with torch.no_grad():
            return self.full[self.begin : self.end].copy_(self.stepped)

    def kept(self) -> list[Tensor]:
        """List the tensors that use memory for parameters: the flat tensor (which may be freed) and the shard."""
        return [each for each in (self.full, self._shard, self._lent) if each is not None]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Cut a tensor of the flat tensor's length into views, one for each rank's shard."""
        bounds = [self.layout.bounds(rank) for rank in range(self.layout.ranks)]
        return [flat[begin:end] for begin, end in bounds]

    @property
    def named(self) -> Named:
        """The parameters with their names."""
        return list(zip(self.names, self.parameters, strict=True))

    @property
    def full_bytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.layout.length * self.dtype.itemsize

    def split(self) -> None:
        """Copy the shard to its own memory, and free the flat tensor."""
        self._shard = self.stepped = self.shard.clone()
        if self._master is not None:
            self.stepped, self._shard, self._master = self._master, None, None
        self.is_split = True
        self._leave = Leave(self.names, self.parameters)
        self.free()

    @torch.no_grad()
    def settle(self, full: Tensor) -> None:
        """Move the flat tensor to other memory of the same length."""
        self.full, self.views = full.copy_(self.full), self.views_of(full)
        self._homes, self._memory = list(self.views), [_memory_of(view) for view in self.views]
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        self._shard = self.stepped = full[self.begin : self.end]

    @torch.no_grad()
    def settle_shard(self, shard: Tensor) -> None:
        """Move the shard, which has its own memory, to other memory of the same length."""
        self._shard = self.stepped = shard.copy_(self.shard)

    def take_memory(self) -> None:
        """Allocate the flat tensor's memory. The values are undefined until the flat tensor is gathered."""
        self.full.untyped_storage().resize_(self.full_bytes)

    def free(self) -> None:
        """Free the flat tensor's memory. The parameters have no data until the flat tensor is gathered again."""
        assert self.is_split
        self.full.untyped_storage().resize_(0)
        self.is_whole = False
        self._leave.begin()

    def arrive(self) -> None:
        """Mark the flat tensor as gathered."""
        self.is_whole = True
        self._leave.end()

    def outdate(self) -> None:
        """Invalidate graphs that have saved the parameters, because a step has changed the values."""
        with as_it_is():
            torch.autograd.graph.increment_version(self.parameters)

    def lose(self) -> None:
        """Mark the parameters as lost: they will never be gathered again."""
        if self.is_split:
            self._leave.lose()

    @torch.no_grad()
    def give_up(self, whole: Sequence[Tensor]) -> None:
        """Detach the parameters from the flat tensor, and use the tensors of `whole` as their data."""
        if self.is_split:
            self._leave.end()
        for parameter, each in zip(self.parameters, whole, strict=True):
            parameter.data = each

    def make_masters(self) -> None:
        """Create a float32 copy of the shard, the master, which the optimizer steps from now on.

        In stage 3, keep only this copy.
        """
        if not self.has_masters():
            self.stepped = self.shard.float()
            if self.is_split:
                self._shard = None

    def has_masters(self) -> bool:
        """Return whether the optimizer steps a float32 copy of the shard."""
        return self.stepped is not self._shard

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the stepped master into the shard."""
        self._lent = None
        if self._shard is not None and self.has_masters():
            self._shard.copy_(self.stepped)

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy values that were written to the whole parameters into the shard and its master."""
        if self.is_split:
            self.shard.copy_(self.full[self.begin : self.end])
        self.follow_shard()

    @torch.no_grad()
    def follow_shard(self) -> None:
        """Copy the elements of the shard that the user has changed since the last rounding into the master."""
        if self.has_masters() and (self._shard is not None or self._lent is not None):
            rounded = self.stepped.to(self.dtype)
            torch.where(rounded == self.shard, self.stepped, self.shard.float(), out=self.stepped)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a tensor to the shard's gradient. If the gradient is None, store the tensor itself, not a copy."""
        self.grad = gradient if self.grad is None else self.grad.add_(gradient)
        if not self.is_split:
            send(self.parameters)

    def drop_gradient(self, *, set_to_none: bool) -> None:
        """Drop the shard's gradient, or replace it by zeros."""
        if set_to_none:
            self.grad = None
        elif self.grad is not None:
            self.grad.zero_()
        self.unsend()

    def unsend(self) -> None:
        """Restore the class of the parameters, which `add_gradient` had changed."""
        if not self.is_split:
            unsend(self.parameters)

    def held(self) -> list[ParameterRange]:
        """List the ranges of parameters in this rank's shard."""
        shard, lent = self.shard, self._shard is None
        shapes = [tuple(shape) for shape in self.shapes]
        return [
            ParameterRange(
                self.names[at.tensor], None, shapes[at.tensor], at.start, at.stop, self.of(shard, at), lent=lent
            )
            for at in self.slices
        ]

    @staticmethod
    def of(shard: Tensor, at: Slice) -> Tensor:
        """Return the elements of a slice in a tensor with the shard's layout."""
        return shard[at.offset : at.offset + at.elements]

    def mend(self, storages: Container[int]) -> None:
        """If a parameter's `.data` was set, copy the values into its view.

        `storages` lists the storages of all flat tensors.
        """
        with as_it_is():
            for place, (parameter, memory) in enumerate(zip(self.parameters, self._memory, strict=True)):
                found = _memory_of(parameter)
                if found == memory:
                    continue
                if found[:-1] == memory[:-1] and parameter.is_contiguous():
                    self._memory[place] = found  # only strides of dimensions of size 1 have changed
                else:
                    self._restore(place, parameter, is_tied=parameter.untyped_storage()._cdata in storages)

    @torch.no_grad()
    def _restore(self, place: int, parameter: nn.Parameter, *, is_tied: bool) -> None:
        self._require_same(place, parameter)
        if is_tied:
            raise RuntimeError(
                f"{self.names[place]}: its data was set to the memory of a sharded parameter, but shards cannot share "
                "memory; copy values with copy_(), or use one parameter for both before wrapping the module"
            )
        if not self.is_whole:
            raise RuntimeError(
                f"{self.names[place]}: its data was set while it was sharded; set the data within gather_full()"
            )
        self.views[place].copy_(parameter)
        # With `keeps_strides`, keep also new strides. The memory is cloned, because it may belong to another tensor.
        own = parameter.detach().clone() if self.keeps_strides else parameter
        parameter.data = self._home_of(own, self.views[place])
        self._homes[place], self._memory[place] = parameter.detach(), _memory_of(parameter)
        self.adopt()

    def _require_same(self, place: int, parameter: nn.Parameter) -> None:
        found = (parameter.shape, parameter.dtype, parameter.device)
        wanted = (self.shapes[place], self.dtype, self.device)
        if found != wanted:
            told = [f"{list(shape)} {dtype} on {device}" for shape, dtype, device in (found, wanted)]
            raise RuntimeError(
                f"{self.names[place]} is {told[0]}, but was {told[1]} when it was sharded; "
                "change a model before wrapping it, then build a new wrapper and optimizer"
            )

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """View a tensor of the flat tensor's length as one tensor per parameter, with the parameter's shape."""
        placed = zip(self.layout.offsets, self.layout.sizes, self.shapes, strict=True)
        return [flat[offset : offset + size].view(shape) for offset, size, shape in placed]


def mend(flat_parameters: Sequence[FlatParameters]) -> None:
    """Accept parameters whose `.data` was set, for example by loading with assign: copy their values into the views.

    Raises:
        RuntimeError: If a parameter has another shape, dtype or device than when it was sharded, or now shares memory
            with another sharded parameter.
    """
    storages = {storage for flat_parameter in flat_parameters for storage, *_ in flat_parameter._memory}
    for flat_parameter in flat_parameters:
        flat_parameter.mend(storages)


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the storage, offset, shape and strides of a tensor."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def by_kind(named: Named) -> list[Named]:
    """Group parameters that can be in one flat tensor: they must have the same dtype, device and `requires_grad`."""
    kinds = dict.fromkeys((each.dtype, each.device, each.requires_grad) for _, each in named)
    return [
        [(name, each) for name, each in named if (each.dtype, each.device, each.requires_grad) == kind]
        for kind in kinds
    ]
