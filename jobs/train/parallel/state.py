"""The state of a model and its optimizer on one rank, as parts of named tensors.

Names are "model/<name>" and "optimizer/<parameter name>/<key>", as in the whole model. So a checkpoint has the same
tensors for any number of ranks in any mode; only the pieces differ.

    whole on several ranks      dealt: every rank writes a flat range of all bytes, and reads everything
    sharded (ZeRO, fsdp)        block1.up (4, 6)    rank 0  [0, 10)    rank 1  [10, 20)    rank 2  [20, 24)
    a slice of the layers       rank 0  embed block1    rank 1  block2 norm head; a shared parameter by its first name
    a part of every layer       each of these placed in the whole, as boxes (`layers.py`)
"""

import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.modules import room_for
from muster.jobs.tensors.parts import TensorPart, deal, range_piece, whole_part
from muster.jobs.train.parallel.forms import MODEL, OPTIMIZER, buffer_parts, named_as, parameter_of
from muster.jobs.train.parallel.layers import Parts
from muster.jobs.train.parallel.replica import Replica
from muster.jobs.world.world import World
from muster.zero.flat import ParameterRange


class ModelState:
    """The parts that one rank saves and loads. `more` has additional tensors, equal on all ranks.

    Listing a thousand tensors takes longer than copying a small model, and would stall every save. So the list is
    rebuilt only after the optimizer has created state.
    """

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        parts: Parts,
        world: World,
        more: Mapping[str, Tensor],
    ) -> None:
        self.replica = replica
        self.optimizer = optimizer
        self.model = parts
        self.more = more
        self.leads = world.pipe_rank == 0  # the first stage's ranks save `more`
        self.aliases = parts.whole.aliases  # a shared parameter is saved by the stage that has its first name
        self._parts: list[TensorPart] = []
        self._listed: list[object] | None = None  # the optimizer's tensors when the parts were listed

    def parts(self) -> list[TensorPart]:
        """List the parts that this rank saves. Together, the ranks save each part once.

        The list stays the same object until the optimizer creates new state. Data rank 0 saves the buffers.
        """
        stepping = getattr(self.optimizer, "inner", self.optimizer)
        now = [value for state in stepping.state.values() for value in state.values()]
        if self._listed is None or len(now) != len(self._listed) or not all(map(operator.is_, now, self._listed)):
            parts, stays = self._saved()
            self._parts = [placed for part in parts for placed in self.model.placed(part, answering=True)]
            self._listed = now if stays else None
        return self._parts

    def _saved(self) -> tuple[list[TensorPart], bool]:
        """List the parts that this rank saves; also return whether the list stays valid until new state is created."""
        module, rank, ranks = self.replica.module, self.replica.world.rank, self.replica.world.size
        own = [*buffer_parts(module), *(self._more() if self.leads else ())]
        ranges = self.replica.ranges(self.optimizer)
        if ranges is not None:
            held = [part_of(each) for each in ranges if each.answers and each.name not in self.aliases]
            return [*(own if rank == 0 else ()), *held], not any(each.lent for each in ranges)
        every = [*parameter_parts(module), *optimizer_parts(module, self.optimizer)]
        shared = [part for part in every if parameter_of(part.piece.name) not in self.aliases]
        # A range of a tensor that is not row-major is a copy, which would be stale after the next step.
        return deal(own, shared, rank=rank, ranks=ranks), all(part.tensor.is_contiguous() for part in shared)

    def copies(self) -> list[TensorPart]:
        """List all state of this rank's layers, which must be whole here, also what other ranks would save."""
        module = self.replica.module
        return [
            *buffer_parts(module),
            *self._more(),
            *parameter_parts(module),
            *optimizer_parts(module, self.optimizer),
        ]

    def wanted(self, stored: Mapping[str, Piece]) -> list[TensorPart]:
        """List the parts of a checkpoint that this rank loads, to be filled in place.

        Raises:
            RefusedError: on every rank, if the checkpoint belongs to another model.
        """
        forms = self.model.whole
        model = [*forms.pieces.values(), *forms.buffers]
        require_same_names([piece.name for piece in model], stored)
        require_trained(stored, forms.trained)
        local = {name: self.model.local_piece(piece) for name, piece in stored.items()}
        own = [*buffer_parts(self.replica.module), *(part for part in self._more() if part.piece.name in stored)]
        own += map(self._named, self._read(local))
        parts = [placed for part in own for placed in self.model.placed(part, answering=False)]
        for piece in (*model, *(part.piece for part in parts)):
            require_same_form(piece, stored[piece.name])
        return parts

    def wanted_copies(self, stored: Mapping[str, Piece]) -> list[TensorPart]:
        """List the parts to fill from the `copies` of a rank with the same layers. Call this before the first step.

        Raises:
            RefusedError: if that rank has other layers.
        """
        module = self.replica.module
        own = [*buffer_parts(module), *self._more(), *parameter_parts(module)]
        optimizer = {name: piece for name, piece in stored.items() if name.startswith(OPTIMIZER)}
        if {part.piece.name for part in own} != stored.keys() - optimizer.keys():
            raise RefusedError("the layers of this rank are not those of the rank whose state it takes over")
        return [*own, *stored_optimizer(module, self.optimizer, optimizer)]

    def _read(self, stored: Mapping[str, Piece]) -> list[TensorPart]:
        """List the parameters of this rank's layers and the stored optimizer state, under this rank's names."""
        module, ranges = self.replica.module, self.replica.ranges(self.optimizer)
        if ranges is not None:
            return [part for part in map(part_of, ranges) if self._named(part).piece.name in stored]
        here = {self.aliases.get(name, name): name for name, _ in module.named_parameters()}
        own = {
            named_as(name, here[parameter_of(name)]): piece
            for name, piece in stored.items()
            if name.startswith(OPTIMIZER) and parameter_of(name) in here
        }
        return [*parameter_parts(module), *stored_optimizer(module, self.optimizer, own)]

    def _named(self, part: TensorPart) -> TensorPart:
        """Rename a part to its name in the whole model."""
        first = self.aliases.get(parameter_of(part.piece.name))
        return (
            part if first is None else replace(part, piece=replace(part.piece, name=named_as(part.piece.name, first)))
        )

    def _more(self) -> list[TensorPart]:
        return [whole_part(name, tensor) for name, tensor in self.more.items()]


def part_of(held: ParameterRange) -> TensorPart:
    """Convert a range on this rank to a part of a named tensor."""
    name = MODEL + held.name if held.key is None else f"{OPTIMIZER}{held.name}/{held.key}"
    piece = range_piece(name, held.tensor.dtype, held.shape, held.start, held.stop)
    return TensorPart(piece, held.tensor.detach().view(piece.extent))


def parameter_parts(module: nn.Module) -> list[TensorPart]:
    """List the parameters, including frozen ones, in the model's order, shared ones once."""
    return [whole_part(MODEL + name, parameter) for name, parameter in module.named_parameters()]


def optimizer_parts(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[TensorPart]:
    """List the tensors of the optimizer's state. Before the first step there may be none."""
    return [
        whole_part(f"{OPTIMIZER}{name}/{key}", value)
        for name, parameter in module.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]


def stored_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Piece]
) -> list[TensorPart]:
    """List the optimizer's tensors that match stored ones. Create missing ones as the first step would."""
    options = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    by_name = dict(module.named_parameters())
    parts = []
    for name, piece in stored.items():
        parameter, key = by_name[parameter_of(name)], name.rpartition("/")[2]
        state = optimizer.state[parameter]
        if key not in state:
            state[key] = room_for(parameter, key, piece, options[id(parameter)])
        parts.append(whole_part(name, state[key]))
    return parts


def require_same_names(wanted: Iterable[str], stored: Mapping[str, Piece]) -> None:
    """Compare the names of a model's parameters and buffers with the stored ones.

    Raises:
        RefusedError: if the names differ.
    """
    if other := sorted({name for name in stored if name.startswith(MODEL)} ^ set(wanted)):
        side = "only in the checkpoint" if other[0] in stored else "not in the checkpoint"
        raise RefusedError(
            f"the checkpoint is of another model: {other[0].removeprefix(MODEL)} is {side}; check train.model"
        )


def require_trained(stored: Iterable[str], trained: Container[str]) -> None:
    """Check that stored optimizer state belongs to parameters that this model trains.

    Raises:
        RefusedError: if some state belongs to a parameter that this model does not train.
    """
    for name in stored:
        if name.startswith(OPTIMIZER) and parameter_of(name) not in trained:
            of = f"{name.rpartition('/')[2]} of {parameter_of(name)}"
            raise RefusedError(
                f"the checkpoint is of another model: it has {of}, but this job does not train that parameter; "
                "check train.model"
            )


def require_same_form(wanted: Piece, found: Piece) -> None:
    """Compare a tensor's dtype and shape with the stored one's.

    Raises:
        RefusedError: if the dtypes or shapes differ.
    """
    if (wanted.dtype, wanted.shape) != (found.dtype, found.shape):
        raise RefusedError(
            f"the checkpoint is of another model: {wanted.name} is {found.dtype} {list(found.shape)} there, but "
            f"{wanted.dtype} {list(wanted.shape)} in this job; check model and precision"
        )
