"""A model whose layers are split over all ranks: each forwards and backwards its part of every layer.

    rank 0   F B  step      all ranks read the same batch, draw the same numbers where they have the same, and have the
    rank 1   F B  step      same loss; nothing is averaged, for gradients are those of one process already

What ranks have whole - norms, positions, some biases - has the same bits on all of them; rank 0 saves it and counts it
in norms. Everything else is a part, saved as a box of the whole (`tensor_pieces.py`).
"""

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from jobs.checkpoint.pieces import Piece
from jobs.train.clock import Clock
from jobs.train.models.stack import Stack
from jobs.train.models.tensor_plan import split_gpt
from jobs.train.optim import gradients_of
from jobs.train.replica import Replica
from jobs.train.shards import Forms
from jobs.train.state import (
    MODEL,
    OPTIMIZER,
    HeldState,
    Part,
    buffer_parts,
    optimizer_parts,
    owner_of,
    require_same_form,
    require_same_names,
    require_trained,
    stored_optimizer,
    whole_part,
)
from jobs.train.tensor_pieces import parts_of
from jobs.train.world import World
from jobs.train_settings import TrainSettings
from pipe.tensor.slices import TensorSlice
from pipe.tensor.split import TensorParallel


class TensorReplica(Replica):
    """One rank's part of every layer of a GPT."""

    def __init__(self, split: TensorParallel, forms: Forms, world: World, clock: Clock) -> None:
        super().__init__(split.module, world, clock)
        self.slices = split.slices
        self.forms = forms
        self.shard_group = world.group

    def counted(self) -> list[Tensor]:
        """Return the gradients that no other rank counts."""
        return gradients_of(each for name, each in self.module.named_parameters() if self.slices[name].answers)

    def held(self, optimizer: torch.optim.Optimizer, more: Mapping[str, Tensor]) -> HeldState:
        """Return this rank's parts of the state; rank 0 saves `more` besides."""
        return TensorState(self.module, optimizer, self.forms, self.slices, leads=self.world.rank == 0, more=more)

    def full_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients that the last step was made with."""
        return {
            name: self._whole(name, each.grad) for name, each in self.module.named_parameters() if each.grad is not None
        }

    def full_parameters(self) -> dict[str, Tensor]:
        """Gather the parameters."""
        return {name: self._whole(name, each.detach()) for name, each in self.module.named_parameters()}

    def _whole(self, name: str, part: Tensor) -> Tensor:
        dimension = self.slices[name].dimension
        if dimension is None:
            return part.detach().clone()
        return torch.cat(self.world.gather(part.detach().contiguous()), dimension)


class TensorState:
    """What one rank of a split model saves and reads.

    `leads` is true for the rank that saves what all have: `more`, and buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        forms: Forms,
        slices: Mapping[str, TensorSlice],
        *,
        leads: bool,
        more: Mapping[str, Tensor],
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.forms = forms
        self.slices = slices
        self.leads = leads
        self.more = more
        self._parts: list[Part] = []
        self._listed: list[object] | None = None  # the optimizer's state as it was listed; None: never

    def parts(self) -> list[Part]:
        """Return what this rank answers for, listed anew only when the optimizer has made state since."""
        now = [value for state in self.optimizer.state.values() for value in state.values()]
        if self._listed is None or len(now) != len(self._listed) or not all(map(operator.is_, now, self._listed)):
            own = [*buffer_parts(self.module), *self._more()] if self.leads else []
            state = optimizer_parts(self.module, self.optimizer)
            self._parts = [*own, *self._model(answering=True), *self._in_whole(state, answering=True)]
            self._listed = now
        return self._parts

    def wanted(self, stored: Mapping[str, Piece]) -> list[Part]:
        """Ask for this rank's parts, where something is stored for them.

        Raises:
            RefusedError: the checkpoint is of another model; on every rank.
        """
        model = [*self.forms.pieces.values(), *self.forms.buffers]
        require_same_names([piece.name for piece in model], stored)
        own: dict[str, Piece] = {}
        for name, piece in stored.items():
            if name.startswith(OPTIMIZER):
                require_trained(name, self.forms.trained)
                cut = self.slices[owner_of(name)[0]]
                own[name] = replace(piece, shape=cut.local_shape) if piece.shape == cut.shape else piece
        state = self._in_whole(stored_optimizer(self.module, self.optimizer, own), answering=False)
        parts = [*buffer_parts(self.module), *(part for part in self._more() if part.piece.name in stored)]
        parts += [*self._model(answering=False), *state]
        for piece in (*model, *(part.piece for part in parts)):
            require_same_form(piece, stored[piece.name])
        return parts

    def _model(self, *, answering: bool) -> list[Part]:
        return [
            part
            for name, each in self.module.named_parameters()
            if self.slices[name].answers or not answering
            for part in parts_of(MODEL + name, self.slices[name], each)
        ]

    def _in_whole(self, state: list[Part], *, answering: bool) -> list[Part]:
        """Place what the optimizer keeps of each local part; what it keeps of all of a parameter, one rank saves."""
        placed: list[Part] = []
        for part in state:
            cut = self.slices[owner_of(part.piece.name)[0]]
            if part.piece.shape != cut.local_shape:
                placed += [part] if cut.has_first or not answering else []
            elif cut.answers or not answering:
                placed += parts_of(part.piece.name, cut, part.tensor)
        return placed

    def _more(self) -> list[Part]:
        return [whole_part(name, tensor) for name, tensor in self.more.items()]


def split_layers(module: nn.Module, world: World, clock: Clock, settings: TrainSettings) -> Replica:
    """Split a model that every rank has built, in place.

    Raises:
        ValueError: it is no GPT, or its heads, d_ff or vocabulary cannot be split over so many ranks.
    """
    assert isinstance(module, Stack)
    forms = Forms(module)
    return TensorReplica(split_gpt(module, world.group), forms, world, clock)
