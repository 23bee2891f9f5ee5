"""What a rank of a split model holds, as pieces of global tensors: checkpoints know no tensor ranks.

up (32, 16), split along 0      rank 1 of 2: one range of row-major elements        [flat 256:512]
down (16, 32), split along 1    rank 1 of 2: a box                                  [0:16,16:32]
a flat range of that box        as ZeRO cuts one: at most three boxes of a matrix   [3:4,20:32] [4:9,16:32] [9:10,16:17]
"""

import math

from torch import Tensor

from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.parts import DTYPES, Part
from muster.pipe.tensor.slices import TensorSlice


def parts_of(name: str, cut: TensorSlice, tensor: Tensor, start: int = 0) -> list[Part]:
    """Return elements from `start` on, of this rank's part of a tensor flattened row by row, as parts that are views.

    `name` is the checkpoint's ("model/...", "optimizer/..."), `tensor` holds them, flat or in the part's shape.

    Raises:
        ValueError: they are more than this rank's part has.
    """
    dtype, flat = DTYPES[tensor.dtype], tensor.detach().view(-1)
    stop = start + flat.numel()
    if cut.dimension is None and (start, stop) == (0, math.prod(cut.shape)):
        return [Part(Piece(name, dtype, cut.shape), flat.view(cut.shape))]
    boxes = cut.boxes(start, stop)
    if cut.offset is not None:
        return [Part(Piece(name, dtype, cut.shape, flat=(cut.offset + start, cut.offset + stop)), flat)]
    pieces = [(begin - start, end - start, Piece(name, dtype, cut.shape, box=box)) for (begin, end), box in boxes]
    return [Part(piece, flat[begin:end].view(piece.extent)) for begin, end, piece in pieces]
