"""The state of a slice of a model, as parts: a rank of a pipeline saves and reads its own layers' tensors, whole.

rank 0  embed block1 block2       rank 1  block3 norm head        one process, or any other split, reads the same
names   those of the whole model; of a shared parameter the first, saved by the rank that has that one
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.parts import Part, whole_part
from muster.jobs.train.shards import Forms
from muster.jobs.train.state import (
    MODEL,
    OPTIMIZER,
    DealtState,
    buffer_parts,
    optimizer_parts,
    owner_of,
    parameter_parts,
    require_same_form,
    require_same_names,
    require_trained,
    stored_optimizer,
)


class StageState(DealtState):
    """What one rank saves and reads; ranks of other pipelines that have the same layers share them out.

    `leads` is true for the rank that saves `more`, which all have.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        forms: Forms,
        *,
        rank: int,
        ranks: int,
        leads: bool,
        more: Mapping[str, Tensor],
    ) -> None:
        super().__init__(module, optimizer, rank=rank, ranks=ranks, more=more)
        self.forms = forms
        self.leads = leads
        names = [name for name, _ in module.named_parameters()]
        self.saved_as = {name: forms.aliases.get(name, name) for name in names}
        self.copies = {name for name in names if self.saved_as[name] != name}  # another rank saves these

    def wanted(self, stored: Mapping[str, Piece]) -> list[Part]:
        """Ask for this rank's layers, where something is stored for them.

        Raises:
            RefusedError: the checkpoint is of another model; on every rank, whatever it has.
        """
        model = [*self.forms.pieces.values(), *self.forms.buffers]
        require_same_names([piece.name for piece in model], stored)
        for name in stored:
            if name.startswith(OPTIMIZER):
                require_trained(name, self.forms.trained)
        here_as = {saved: here for here, saved in self.saved_as.items()}
        own = {
            f"{OPTIMIZER}{here_as[owner_of(name)[0]]}/{owner_of(name)[1]}": piece
            for name, piece in stored.items()
            if name.startswith(OPTIMIZER) and owner_of(name)[0] in here_as
        }
        parts = [*parameter_parts(self.module), *stored_optimizer(self.module, self.optimizer, own)]
        whole = [*buffer_parts(self.module), *(part for part in self._more() if part.piece.name in stored)]
        parts = [*whole, *map(self._named, parts)]
        for piece in (*model, *(part.piece for part in parts)):
            require_same_form(piece, stored[piece.name])
        return parts

    def _own(self) -> list[Part]:
        return [*buffer_parts(self.module), *(self._more() if self.leads else ())]

    def _shared(self) -> list[Part]:
        parts = [*parameter_parts(self.module), *optimizer_parts(self.module, self.optimizer)]
        return [self._named(part) for part in parts if self._owner(part) not in self.copies]

    def _more(self) -> list[Part]:
        return [whole_part(name, tensor) for name, tensor in self.more.items()]

    def _owner(self, part: Part) -> str:
        name = part.piece.name
        return owner_of(name)[0] if name.startswith(OPTIMIZER) else name.removeprefix(MODEL)

    def _named(self, part: Part) -> Part:
        """Give a part the name that the whole model has for it."""
        here = self._owner(part)
        if (saved := self.saved_as[here]) == here:
            return part
        is_optimizers = part.piece.name.startswith(OPTIMIZER)
        name = f"{OPTIMIZER}{saved}/{owner_of(part.piece.name)[1]}" if is_optimizers else MODEL + saved
        return replace(part, piece=replace(part.piece, name=name))
