"""Tensors of a state under their stored names, how ranks share them, and this rank's parts of them.

model/fc.weight         every rank has all of it: dealt out, each rank writes its share
model/bn.running_mean   every rank has its own: rank 0's counts
model/fc.weight         of a DTensor, of `muster.zero` or a pipeline: each rank has some of it
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import MAX_NAME, Piece, whole
from muster.jobs.session.boxes import DTENSOR, box_of
from muster.jobs.tensors.parts import DTYPES, Part, deal

INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Leaf:
    """A tensor of the state.

    `dealt`: every rank has the same, and each writes a share. `compared`: it must be the same on every rank. `piece`:
    this rank has only that part of it, and writes it if it `answers`.
    """

    name: str
    tensor: Tensor
    dealt: bool = False
    compared: bool = False
    piece: Piece | None = None
    answers: bool = True

    @property
    def local(self) -> Tensor:
        """The memory of this rank."""
        return self.tensor._local_tensor if is_dtensor(self.tensor) else self.tensor  # type: ignore[attr-defined]

    @property
    def is_split(self) -> bool:
        """True when ranks may have different parts."""
        return self.piece is not None or is_dtensor(self.tensor)

    @property
    def memory(self) -> tuple[object, ...]:
        """What changes when the tensor lies elsewhere or has another form."""
        local = self.local
        return (self.name, self.answers, local.data_ptr(), local.shape, local.stride(), local.dtype, local.device)

    @property
    def form(self) -> str:
        """Name, type and global shape as text."""
        shape = self.piece.shape if self.piece is not None else tuple(self.tensor.shape)
        return f"{self.name} {DTYPES[self.tensor.dtype]} {list(shape)}"

    def part(self) -> tuple[Part, bool]:
        """Return this rank's part, and whether this rank writes it.

        Raises:
            RefusedError: a DTensor is sharded in a way that cannot be stored.
        """
        local, piece, answers = self.local.detach(), self.piece, self.answers
        if is_dtensor(self.tensor):
            box, first = box_of(self.name, self.tensor)
            shape, answers = tuple(self.tensor.shape), answers and first
            piece = Piece(self.name, DTYPES[local.dtype], shape, box=box)
        elif piece is None:
            piece = whole(self.name, DTYPES[local.dtype], tuple(local.shape))
        return Part(piece, local if tuple(local.shape) == piece.extent else local.view(piece.extent)), answers


def is_dtensor(value: object) -> bool:
    """True for a DTensor; nothing is imported to find out."""
    module = sys.modules.get(DTENSOR)
    return module is not None and isinstance(value, module.DTensor)


def check(path: str, value: Tensor) -> None:
    """Check that a tensor can be stored.

    Raises:
        RefusedError: it cannot; the message says why.
    """
    why = ""
    if nn.parameter.is_lazy(value):
        why = "has no shape before the first forward; run one forward before run.state()"
    elif is_traceable_wrapper_subclass(value) and not is_dtensor(value):
        why = f"a {type(value).__name__} cannot be stored; only plain tensors and DTensors can"
    elif value.layout != torch.strided:
        why = f"a sparse tensor ({value.layout}) cannot be stored; make it dense"
    elif value.is_quantized:
        why = "a quantized tensor cannot be stored; store int_repr(), scale and zero point"
    elif value.is_meta:
        why = "a tensor on the meta device has no values; initialize it before run.state()"
    elif value.dtype not in DTYPES:
        why = f"{value.dtype} cannot be stored; known types: {', '.join(str(each)[6:] for each in DTYPES)}"
    elif len(path) > MAX_NAME or not path.isprintable():
        why = f"a name is at most {MAX_NAME} printable characters"
    if why:
        raise RefusedError(f"state: {path:.200}: {why}")


class Leaves(list[Leaf]):
    """The leaves of one object; a tree's tensors are added as they are met."""

    def __init__(self) -> None:
        super().__init__()
        self._names: set[str] = set()

    def leaf(self, path: str, value: Any) -> Any:
        """Take a tensor of a tree, for `trees.Encoder`; rank 0's is stored."""
        if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray) and value.dtype == "uint8":
            value = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if not isinstance(value, Tensor):
            return None
        while path in self._names:  # of two keys that are spelt alike, as 1 and "1"
            path += "'"
        self.add(Leaf(path, value, compared=True))
        return {"$": "tensor", "v": path}

    def add(self, leaf: Leaf) -> None:
        """Add a leaf that can be stored."""
        check(leaf.name, leaf.tensor)
        if leaf.name in self._names:
            raise RefusedError(f"state: {leaf.name}: two tensors have this name; register their owners by other names")
        self._names.add(leaf.name)
        self.append(leaf)


def parts_of(leaves: Iterable[Leaf], *, rank: int, ranks: int) -> tuple[list[Part], bool]:
    """Return the parts that this rank writes, and whether they stay valid while no leaf moves."""
    own: list[Part] = []
    shared: list[Part] = []
    held: list[Part] = []
    for leaf in leaves:
        part, answers = leaf.part()
        if leaf.is_split:
            if answers and (part.piece.elements or not part.piece.tensor_elements):
                held.append(part)
        else:
            (shared if leaf.dealt else own).append(part)
    # A range of a tensor that is not row-major is a copy, which the next step would leave behind.
    stays = ranks == 1 or all(part.tensor.is_contiguous() for part in shared)
    return [*deal(own, shared, rank=rank, ranks=ranks), *held], stays


def fingerprints(leaves: Sequence[Leaf]) -> Tensor:
    """Return the sum of each tensor's bits, read as integers, as int64 on the CPU, (leaves,)."""
    sums = []
    with torch.no_grad():
        for leaf in leaves:
            bits = leaf.tensor.detach().view(INTEGERS[leaf.tensor.element_size()])
            sums.append(bits.sum(dtype=torch.int64).cpu())
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
