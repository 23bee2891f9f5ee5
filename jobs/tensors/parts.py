"""Parts: tensors of this rank, each with its piece of a logical tensor (`jobs/checkpoint/pieces.py`).

A part is a whole tensor, a box of it, or a flat range of its elements. State replicated on several ranks is divided
into flat ranges, so that every rank writes a share. A rank that owns a range or some layers writes all that it owns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from muster.jobs.checkpoint.pieces import Piece, whole

DTYPES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorPart:
    """A piece of a logical tensor, and the tensor of this rank with its elements."""

    piece: Piece
    tensor: Tensor


def dtype_of(piece: Piece) -> torch.dtype:
    """Return PyTorch's dtype for a stored tensor."""
    return next(dtype for dtype, name in DTYPES.items() if name == piece.dtype)


def range_piece(name: str, dtype: torch.dtype, shape: tuple[int, ...], start: int, stop: int) -> Piece:
    """Return elements [start, stop) of a tensor, in row-major order, as a piece."""
    piece = whole(name, DTYPES[dtype], shape)
    return piece if (start, stop) == (0, piece.elements) else replace(piece, flat=(start, stop))


def whole_part(name: str, tensor: Tensor) -> TensorPart:
    """Return the part for a tensor that this rank has as a whole."""
    return TensorPart(whole(name, DTYPES[tensor.dtype], tuple(tensor.shape)), tensor.detach())


def deal(own: Sequence[TensorPart], shared: Sequence[TensorPart], *, rank: int, ranks: int) -> list[TensorPart]:
    """Return the parts that one rank writes, so that all ranks write the same number of bytes, each byte once.

        rank 0   own own own s      `own` is state of rank 0 only; if it exceeds rank 0's share, rank 0 writes no `s`
        rank 1   s s s s s s s      `shared` is replicated on all ranks
        rank 2   s s s s s s s

    An element is never cut. Cuts depend only on the sizes of the parts, so all ranks compute the same ones.
    """
    total = sum(part.piece.nbytes for part in shared)
    of_own = sum(part.piece.nbytes for part in own)
    first = max(0, min(total, (total + of_own) // ranks - of_own)) if ranks > 1 else total
    cuts = [0, *(first + (total - first) * each // max(ranks - 1, 1) for each in range(ranks))]
    parts = list(own) if rank == 0 else []
    begins = 0
    for part in shared:
        size = part.tensor.element_size()
        start, stop = (_element(cut - begins, size, part.piece.elements) for cut in cuts[rank : rank + 2])
        if cuts[rank + 1] == total:
            stop = part.piece.elements
        if start < stop or (part.piece.elements == 0 and rank == 0):
            parts.append(flat_part(part, start, stop))
        begins += part.piece.nbytes
    return parts


def flat_part(part: TensorPart, start: int, stop: int) -> TensorPart:
    """Return elements [start, stop) of a whole tensor, in row-major order."""
    if (start, stop) == (0, part.piece.elements):
        return part
    # reshape copies only a tensor that is not row-major
    return TensorPart(replace(part.piece, flat=(start, stop)), part.tensor.reshape(-1)[start:stop])


def _element(byte: int, size: int, elements: int) -> int:
    """Return the first element that begins at or after a byte offset, which may be outside the tensor."""
    return min(max(-(-byte // size), 0), elements)
