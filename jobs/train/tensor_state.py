"""The state of a rank that has a part of every layer: what a replica of those parts holds, placed in the whole.

    down (16, 32), split along 1      rank 1 of 2 has (16, 16)      saved as the box [0:16, 16:32] of down
    ... and of data rank 1 of 2       elements 128 to 256 of those  as the boxes that these are

What tensor ranks have whole, the first of them saves. One number for all of a parameter, as a step count is, the rank
with the parameter's first element does.
"""

from collections.abc import Mapping
from dataclasses import replace

from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.parts import HeldState, Part
from muster.jobs.train.state import MODEL, OPTIMIZER, owner_of, require_same_form, require_same_names
from muster.jobs.train.tensor_parts import Parts
from muster.jobs.train.tensor_pieces import parts_of
from muster.pipe.tensor.slices import TensorSlice


class TensorState:
    """What one rank of a split model saves and reads: `inner` knows the rank's parts as if they were the model."""

    def __init__(self, inner: HeldState, model: Parts) -> None:
        self.inner = inner
        self.model = model
        self._listed: list[Part] | None = None  # the inner state's list, as it was placed
        self._parts: list[Part] = []

    def parts(self) -> list[Part]:
        """Return what this rank answers for, placed anew only when the inner state has been listed anew."""
        now = self.inner.parts()
        if now is not self._listed:
            self._parts = [placed for part in now for placed in self._placed(part, answering=True)]
            self._listed = now
        return self._parts

    def wanted(self, stored: Mapping[str, Piece]) -> list[Part]:
        """Ask for this rank's parts, where something is stored for them.

        Raises:
            RefusedError: the checkpoint is of another model; on every rank.
        """
        model = [*self.model.whole.pieces.values(), *self.model.whole.buffers]
        require_same_names([piece.name for piece in model], stored)
        for piece in model:
            require_same_form(piece, stored[piece.name])
        own = self.inner.wanted({name: self._local(piece) for name, piece in stored.items()})
        parts = [placed for part in own for placed in self._placed(part, answering=False)]
        for part in parts:
            require_same_form(part.piece, stored[part.piece.name])
        return parts

    def _slice_of(self, name: str) -> TensorSlice | None:
        """Return where the parameter lies that a name of a checkpoint speaks of; None for buffers and the like."""
        return self.model.slice_of(owner_of(name)[0] if name.startswith(OPTIMIZER) else name.removeprefix(MODEL))

    def _local(self, piece: Piece) -> Piece:
        """Return a stored tensor in the shape that this rank's part of it has."""
        cut = self._slice_of(piece.name)
        return piece if cut is None or piece.shape != cut.shape else replace(piece, shape=cut.local_shape)

    def _placed(self, part: Part, *, answering: bool) -> list[Part]:
        cut = self._slice_of(part.piece.name)
        if cut is None:
            return [part] if self.model.world.rank == 0 or not answering else []
        if part.piece.shape != cut.local_shape:
            return [part] if cut.has_first or not answering else []
        if answering and not cut.answers:
            return []
        return parts_of(part.piece.name, cut, part.tensor, part.piece.flat[0] if part.piece.flat else 0)
