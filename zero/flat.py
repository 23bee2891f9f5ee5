"""Parameters side by side in one flat tensor, of which this rank answers for a shard.

    full     | block1.up | block1.down | block1.norm |        each parameter's data is a view of its part
    shard           ^^^^^^^^^^^                               this rank's: what its optimizer steps

In stages 1 and 2 the flat tensor is always there, and the shard is a view of it: what the optimizer writes is in place
already. In stage 3 the shard has memory of its own, and the flat tensor's is taken and given back (`whole`, `free`);
views stay views of it meanwhile, what autograd has saved for the backward too.

A parameter of 16 bits may have a *master*: the shard in float32, which is what is stepped then. Where the whole is
gathered anew each time (stage 3), the master is all that is kept: it is rounded into its place of the whole.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from muster.ddp.gradients import Named
from muster.zero.absent import Leave, as_it_is, send, unsend
from muster.zero.layout import Layout, Slice

ALIGNMENT: Final = 64  # bytes: as PyTorch's CPU allocator has it; NCCL wants 16


@dataclass(frozen=True)
class Held:
    """Elements [start, stop) of a parameter, flattened row by row, or of its optimizer state under `key`.

    `tensor` holds them on this rank and may be filled in place. A state that is one number for all of a parameter, as
    a step count is, has the shape (), and every rank that holds a part of the parameter holds it: the one with its
    first element answers for it. What is `lent` was made for who asked, and is old after the next step.
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
    """Some parameters of one type on one device, and this rank's shard of them.

    All learn, or none. They become row-major views of one tensor. `grad` is the shard of the mean gradient, once there
    is one.
    """

    def __init__(self, named: Named, *, rank: int, ranks: int) -> None:
        first = named[0][1]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.shapes = [parameter.shape for _, parameter in named]
        self.dtype, self.device = first.dtype, first.device
        self.trains = first.requires_grad
        self.rank = rank
        sizes = tuple(parameter.numel() for _, parameter in named)
        self.layout = Layout(sizes, ranks, ALIGNMENT // self.dtype.itemsize)
        self.begin, self.end = self.layout.bounds(rank)
        self.slices = self.layout.slices(rank)
        self.full = torch.zeros(self.layout.length, dtype=self.dtype, device=self.device)
        self.views = self.views_of(self.full)
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self.views, strict=True):
                view.copy_(parameter)
                parameter.data = view
        self._shard: Tensor | None = self.full[self.begin : self.end]
        self._lent: Tensor | None = None  # what a shard that is not kept would be
        self.stepped = self._shard  # or its master
        self.grad: Tensor | None = None
        self.is_split = False  # True: the shard has memory of its own
        self.is_whole = True  # False: the flat tensor has no memory now

    @property
    def shard(self) -> Tensor:
        """This rank's part. One that is not kept is made anew, and forgotten when the master is stepped."""
        if self._shard is not None:
            return self._shard
        if self._lent is None:
            self._lent = self.stepped.detach().to(self.dtype)
        return self._lent

    def sent(self) -> Tensor:
        """Return this rank's part as a gather of the whole sends it."""
        if self._shard is not None:
            return self._shard
        with torch.no_grad():
            return self.full[self.begin : self.end].copy_(self.stepped)

    def kept(self) -> list[Tensor]:
        """List the memory that parameters are in: of the whole, which may have none now, and of the shard."""
        return [each for each in (self.full, self._shard, self._lent) if each is not None]

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Cut a tensor of the whole's length into the ranks' shards, as views."""
        bounds = [self.layout.bounds(rank) for rank in range(self.layout.ranks)]
        return [flat[begin:end] for begin, end in bounds]

    @property
    def named(self) -> Named:
        """The parameters, with their names."""
        return list(zip(self.names, self.parameters, strict=True))

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole."""
        return self.layout.length * self.dtype.itemsize

    def split(self) -> None:
        """Give the shard memory of its own, and the flat tensor's back."""
        self._shard = self.stepped = self.shard.clone()
        self.is_split = True
        self._leave = Leave(self.names, self.parameters)
        self.free()

    @torch.no_grad()
    def settle(self, full: Tensor) -> None:
        """Move the whole to other memory of its length."""
        self.full, self.views = full.copy_(self.full), self.views_of(full)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        self._shard = self.stepped = full[self.begin : self.end]

    @torch.no_grad()
    def settle_shard(self, shard: Tensor) -> None:
        """Move the shard, which has memory of its own, to other memory of its length."""
        self._shard = self.stepped = shard.copy_(self.shard)

    def take_memory(self) -> None:
        """Give the flat tensor memory again; what it holds is not defined before it has been gathered."""
        self.full.untyped_storage().resize_(self.full_bytes)

    def free(self) -> None:
        """Give the flat tensor's memory back; the parameters have no data then."""
        assert self.is_split
        self.full.untyped_storage().resize_(0)
        self.is_whole = False
        self._leave.begin()

    def arrive(self) -> None:
        """Hear that the flat tensor holds the whole again."""
        self.is_whole = True
        self._leave.end()

    def outdate(self) -> None:
        """Have graphs refused that were made of the parameters so far: they are stepped."""
        with as_it_is():
            torch.autograd.graph.increment_version(self.parameters)

    def lose(self) -> None:
        """Hear that nobody will gather the whole any more."""
        if self.is_split:
            self._leave.lose()

    @torch.no_grad()
    def give_up(self, whole: Sequence[Tensor]) -> None:
        """Let go of the parameters, which take other tensors for their data."""
        if self.is_split:
            self._leave.end()
        for parameter, each in zip(self.parameters, whole, strict=True):
            parameter.data = each

    def make_masters(self) -> None:
        """Step a float32 copy of the shard from now on; where the whole is gathered anew each time, keep that only."""
        if not self.has_masters():
            self.stepped = self.shard.float()
            if self.is_split:
                self._shard = None

    def has_masters(self) -> bool:
        """True when what is stepped is a copy in another type."""
        return self.stepped is not self._shard

    @torch.no_grad()
    def write_back(self) -> None:
        """Round what was stepped into the shard."""
        self._lent = None
        if self._shard is not None and self.has_masters():
            self._shard.copy_(self.stepped)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take the shard, and its master, from the whole parameters: they have been written to."""
        if self.is_split:
            self.shard.copy_(self.full[self.begin : self.end])
        self.follow_shard()

    @torch.no_grad()
    def follow_shard(self) -> None:
        """Take into the master what has been written to the parameters since it was rounded into them."""
        if self.has_masters() and (self._shard is not None or self._lent is not None):
            rounded = self.stepped.to(self.dtype)
            torch.where(rounded == self.shard, self.stepped, self.shard.float(), out=self.stepped)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add to the shard's gradient, which takes the tensor over if there was none."""
        self.grad = gradient if self.grad is None else self.grad.add_(gradient)
        if not self.is_split:
            send(self.parameters)

    def drop_gradient(self) -> None:
        """Forget the shard's gradient."""
        self.grad = None
        self.unsend()

    def unsend(self) -> None:
        """Let parameters be what they were before their gradient was shared out."""
        if not self.is_split:
            unsend(self.parameters)

    def held(self) -> list[Held]:
        """List the ranges of parameters in this rank's shard."""
        shard, lent = self.shard, self._shard is None
        shapes = [tuple(shape) for shape in self.shapes]
        return [
            Held(self.names[at.tensor], None, shapes[at.tensor], at.start, at.stop, self.of(shard, at), lent=lent)
            for at in self.slices
        ]

    @staticmethod
    def of(shard: Tensor, at: Slice) -> Tensor:
        """Return a slice's part of a tensor that is laid out as the shard is."""
        return shard[at.offset : at.offset + at.elements]

    def mend(self, storages: Container[int]) -> None:
        """Take parameters back whose data somebody has set; `storages` are those of all flat tensors."""
        storage = self.full.untyped_storage()._cdata
        with as_it_is():
            for place, (parameter, offset) in enumerate(zip(self.parameters, self.layout.offsets, strict=True)):
                at_home = parameter.untyped_storage()._cdata == storage and parameter.storage_offset() == offset
                if not at_home or parameter.shape != self.shapes[place]:
                    self._bring_home(place, parameter, is_tied=parameter.untyped_storage()._cdata in storages)

    @torch.no_grad()
    def _bring_home(self, place: int, parameter: nn.Parameter, *, is_tied: bool) -> None:
        self._require_same(place, parameter)
        if is_tied:
            raise RuntimeError(
                f"{self.names[place]}: its data was set to the memory of a sharded parameter, and shards cannot share "
                "it; copy values with copy_(), or make them one parameter before the module is wrapped"
            )
        if not self.is_whole:
            raise RuntimeError(
                f"{self.names[place]}: its data was set while it was sharded; set it within gather_full()"
            )
        self.views[place].copy_(parameter)
        parameter.data = self.views[place]
        self.adopt()

    def _require_same(self, place: int, parameter: nn.Parameter) -> None:
        found = (parameter.shape, parameter.dtype, parameter.device)
        wanted = (self.shapes[place], self.dtype, self.device)
        if found != wanted:
            told = [f"{list(shape)} {dtype} on {device}" for shape, dtype, device in (found, wanted)]
            raise RuntimeError(
                f"{self.names[place]} is {told[0]}, and was {told[1]} when it was sharded; "
                "change a model before it is wrapped, and build the wrapper and its optimizer anew"
            )

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """View a tensor of the whole's length as tensors of the parameters' shapes."""
        placed = zip(self.layout.offsets, self.layout.sizes, self.shapes, strict=True)
        return [flat[offset : offset + size].view(shape) for offset, size, shape in placed]


def mend(homes: Sequence[FlatParameters]) -> None:
    """Take parameters back whose data somebody has set, as loading by assignment does: their values count.

    Raises:
        RuntimeError: a parameter has another shape, type or device than when it was sharded, or another's memory.
    """
    storages = {home.full.untyped_storage()._cdata for home in homes}
    for home in homes:
        home.mend(storages)


def by_kind(named: Named) -> list[Named]:
    """Sort parameters by what a flat tensor must have in common: type, device, and whether they learn."""
    kinds = dict.fromkeys((each.dtype, each.device, each.requires_grad) for _, each in named)
    return [
        [(name, each) for name, each in named if (each.dtype, each.device, each.requires_grad) == kind]
        for kind in kinds
    ]
