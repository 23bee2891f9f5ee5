"""The tensors of a state: their stored names, how ranks share them, and the parts that this rank writes.

model/fc.weight         equal on every rank: each rank writes a share
model/bn.running_mean   different on every rank: rank 0 writes its own
model/fc.weight         a DTensor, or held by `muster.zero` or a pipeline: each rank writes the part that it holds
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
from muster.jobs.session.state.boxes import DTENSOR, box_of
from muster.jobs.tensors.parts import DTYPES, TensorPart, deal

PLAIN: Final = (Tensor, nn.Parameter)
CHUNK: Final = 1 << 24  # elements
INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True, eq=False)  # a save creates about a thousand; frozen ones are five times as slow to create
class Leaf:
    """A tensor of the state.

    dealt     every rank has the same values and writes a share; if False, rank 0 writes the whole tensor
    compared  the values must be equal on every rank before the first step
    piece     the part that this rank holds, if ranks hold different parts
    answers   False if another rank writes the same part
    """

    name: str
    tensor: Tensor
    dealt: bool = False
    compared: bool = False
    piece: Piece | None = None
    answers: bool = True

    @property
    def local(self) -> Tensor:
        """The tensor in this rank's memory."""
        return self.tensor._local_tensor if is_dtensor(self.tensor) else self.tensor  # type: ignore[attr-defined]

    @property
    def is_split(self) -> bool:
        """True if ranks hold different parts."""
        return self.piece is not None or is_dtensor(self.tensor)

    @property
    def memory(self) -> tuple[object, ...]:
        """Name, address, shape, strides and dtype of the tensor. When they change, the parts are listed again."""
        local = self.tensor if type(self.tensor) in PLAIN else self.local
        return (self.name, self.answers, local.data_ptr(), local.shape, local.stride(), local.dtype)

    @property
    def form(self) -> str:
        """The name, dtype and global shape as text."""
        shape = self.piece.shape if self.piece is not None else tuple(self.tensor.shape)
        return f"{self.name} {DTYPES[self.tensor.dtype]} {list(shape)}"

    def part(self) -> tuple[TensorPart, bool]:
        """Return this rank's part, and whether this rank writes it.

        Raises:
            RefusedError: if the tensor is a DTensor with a sharding that cannot be stored.
        """
        local, piece, answers = self.local.detach(), self.piece, self.answers
        if is_dtensor(self.tensor):
            box, first = box_of(self.name, self.tensor)
            shape, answers = tuple(self.tensor.shape), answers and first
            piece = Piece(self.name, DTYPES[local.dtype], shape, box=box)
        elif piece is None:
            piece = whole(self.name, DTYPES[local.dtype], tuple(local.shape))
        return TensorPart(piece, local if tuple(local.shape) == piece.extent else local.view(piece.extent)), answers


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, without importing DTensors."""
    if type(value) in PLAIN:
        return False
    module = sys.modules.get(DTENSOR)
    return module is not None and isinstance(value, module.DTensor)


def check(path: str, value: Tensor) -> None:
    """Check that a tensor can be stored.

    Raises:
        RefusedError: if the tensor cannot be stored; the message gives the reason.
    """
    is_short = len(path) <= MAX_NAME and path.isprintable()
    is_dense = type(value) in PLAIN and value.layout is torch.strided and not (value.is_meta or value.is_quantized)
    if is_short and is_dense and value.dtype in DTYPES:
        return
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
    elif not is_short:
        why = f"the name must have at most {MAX_NAME} printable characters"
    if why:
        raise RefusedError(f"state: {path:.200}: {why}")


class Leaves(list[Leaf]):
    """The leaves of a state, in the order in which its objects are captured."""

    def __init__(self) -> None:
        super().__init__()
        self._names: set[str] = set()

    def leaf(self, path: str, value: Any) -> Any:
        """Add a tensor found in a tree and return its JSON record; None for other values. Rank 0's tensor is stored."""
        if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray) and value.dtype == "uint8":
            value = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if not isinstance(value, Tensor):
            return None
        while path in self._names:  # two keys may have the same text, such as 1 and "1"
            path += "'"
        self.add(Leaf(path, value, compared=True))
        return {"$": "tensor", "v": path}

    def add(self, leaf: Leaf) -> None:
        """Check a leaf and add it."""
        check(leaf.name, leaf.tensor)
        if leaf.name in self._names:
            raise RefusedError(f"state: {leaf.name}: two tensors have this name; rename one of their owners")
        self._names.add(leaf.name)
        self.append(leaf)


def parts_of(leaves: Iterable[Leaf], *, rank: int, ranks: int) -> tuple[list[TensorPart], bool]:
    """Return the parts that this rank writes, and whether they stay valid until a leaf's memory changes."""
    own: list[TensorPart] = []
    shared: list[TensorPart] = []
    held: list[TensorPart] = []
    for leaf in leaves:
        part, answers = leaf.part()
        if leaf.is_split:
            if answers and (part.piece.elements or not part.piece.tensor_elements):
                held.append(part)
        else:
            (shared if leaf.dealt else own).append(part)
        # A range of a tensor that is not row-major is a copy, which the next step would make stale.
    stays = ranks == 1 or all(part.tensor.is_contiguous() for part in shared)
    return [*deal(own, shared, rank=rank, ranks=ranks), *held], stays


def fingerprints(leaves: Sequence[Leaf]) -> Tensor:
    """Return the sum of each tensor's bits, read as integers, as int64 on the CPU, (leaves,)."""
    sums = []
    with torch.no_grad():
        for leaf in leaves:
            bits = leaf.tensor.detach().view(INTEGERS[leaf.tensor.element_size()]).reshape(-1)
            # A sum in a wider dtype first converts its whole input, so chunks limit the memory.
            added = [chunk.sum(dtype=torch.int64) for chunk in bits.split(CHUNK)]  # type: ignore[no-untyped-call]
            sums.append(torch.stack(added).sum().cpu())
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
