"""The state of ranks that share it out, as parts: each rank saves and reads the ranges that it holds, in place.

    block1.up (4, 6)    rank 0  [0, 10)    rank 1  [10, 20)    rank 2  [20, 24)

A checkpoint of any other number of ranks, in any other mode, has the same tensors in other ranges.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from muster.jobs.checkpoint.pieces import Piece, whole
from muster.jobs.tensors.parts import DTYPES, Part, whole_part
from muster.jobs.train.state import (
    MODEL,
    OPTIMIZER,
    Seen,
    aliases,
    buffer_parts,
    require_same_form,
    require_same_names,
    require_trained,
)
from muster.zero.flat import Held


class Forms:
    """A model's names, types and shapes, taken before it is shared out or cut: a rank then has some of it only."""

    def __init__(self, module: nn.Module) -> None:
        self.pieces = {
            name: whole(MODEL + name, DTYPES[each.dtype], tuple(each.shape)) for name, each in module.named_parameters()
        }
        self.trained = {name for name, each in module.named_parameters() if each.requires_grad}
        self.buffers = [part.piece for part in buffer_parts(module)]
        self.aliases = aliases(module)  # of shared parameters


class SharedState:
    """What one rank saves and reads. `held` lists its ranges; what is not lent lies where it lay the last time.

    Rank 0 saves besides what every rank has whole: buffers, and if it `leads`, `more`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        forms: Forms,
        held: Callable[[], Sequence[Held]],
        *,
        rank: int,
        more: Mapping[str, Tensor],
        leads: bool = True,
    ) -> None:
        self.module = module
        self.leads = leads
        self.optimizer = optimizer
        self.forms = forms
        self.held = held
        self.rank = rank
        self.more = more
        self._parts: list[Part] = []
        self._seen = Seen(optimizer)

    def parts(self) -> list[Part]:
        """Return the share, listed anew only when the optimizer has made state since."""
        if not self._seen.is_same():
            own = [*buffer_parts(self.module), *(self._more() if self.leads else ())] if self.rank == 0 else []
            held = self.held()
            self._parts = [*own, *(part_of(each) for each in held if each.answers)]
            self._seen.take(keep=not any(each.lent for each in held))
        return self._parts

    def wanted(self, stored: Mapping[str, Piece]) -> list[Part]:
        """Ask for the ranges that this rank has, where something is stored for them.

        Raises:
            RefusedError: the checkpoint is of another model; on every rank, whatever it holds.
        """
        whole_parts = [*buffer_parts(self.module), *(part for part in self._more() if part.piece.name in stored)]
        model = [*self.forms.pieces.values(), *self.forms.buffers]
        require_same_names([piece.name for piece in model], stored)
        for name in stored:
            if name.startswith(OPTIMIZER):
                require_trained(name, self.forms.trained)
        parts = [part for part in map(part_of, self.held()) if part.piece.name in stored]
        for piece in (*model, *(part.piece for part in (*whole_parts, *parts))):
            require_same_form(piece, stored[piece.name])
        return [*whole_parts, *parts]

    def _more(self) -> list[Part]:
        return [whole_part(name, tensor) for name, tensor in self.more.items()]


def part_of(held: Held) -> Part:
    """Return a range that a rank holds as a part of a logical tensor."""
    name = MODEL + held.name if held.key is None else f"{OPTIMIZER}{held.name}/{held.key}"
    piece = whole(name, DTYPES[held.tensor.dtype], held.shape)
    if (held.start, held.stop) != (0, piece.elements):
        piece = Piece(name, piece.dtype, held.shape, flat=(held.start, held.stop))
    return Part(piece, held.tensor.detach().view(piece.extent))
