"""An engine's state as named parts, to be saved and to be read back: parameters, buffers, optimizer state.

Names are "model/<name>" and "optimizer/<name of the parameter>/<key>", whatever ranks hold them. An engine says what
it holds and answers for (`held_state`), and what it needs of what is stored (`wanted_state`).
"""

import operator
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.tensors.parts import DTYPES, Part, deal, whole_part

MODEL: Final = "model/"
OPTIMIZER: Final = "optimizer/"


def buffer_parts(module: nn.Module) -> list[Part]:
    """List the buffers that belong to the state, in the model's order; a shared one once."""
    persistent = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        for name in part._buffers.keys() - part._non_persistent_buffers_set
    }
    return [whole_part(MODEL + name, buffer) for name, buffer in module.named_buffers() if name in persistent]


def parameter_parts(module: nn.Module) -> list[Part]:
    """List the parameters, frozen ones too, in the model's order; a shared one once."""
    return [whole_part(MODEL + name, parameter) for name, parameter in module.named_parameters()]


def optimizer_parts(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Part]:
    """List what the optimizer keeps of each parameter by now: before its first step that is nothing."""
    return [
        whole_part(f"{OPTIMIZER}{name}/{key}", value)
        for name, parameter in module.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]


def aliases(module: nn.Module) -> dict[str, str]:
    """Return the further names of shared parameters, each with the name that it is saved under."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}


class Seen:
    """The tensors of an optimizer's state, as they were when they were last listed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._tensors: list[object] | None = None

    def is_same(self) -> bool:
        """True when they are still those very tensors."""
        seen, now = self._tensors, self._now()
        return seen is not None and len(now) == len(seen) and all(map(operator.is_, now, seen))

    def take(self, *, keep: bool) -> None:
        """See them as they are; or if what was listed is not to be kept, none."""
        self._tensors = self._now() if keep else None

    def _now(self) -> list[object]:
        return [value for state in self.optimizer.state.values() for value in state.values()]


class DealtState:
    """A rank's share of a replica's state, dealt anew only when the optimizer has made state since.

    To list a thousand tensors takes longer than to copy a small model, and would be part of every save's stall.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rank: int,
        ranks: int,
        more: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.more = more  # further tensors, the same on every rank
        self.rank = rank
        self.ranks = ranks
        self._parts: list[Part] = []
        self._seen = Seen(optimizer)

    def parts(self) -> list[Part]:
        """Return the share; the buffers are rank 0's, whose running statistics count."""
        if not self._seen.is_same():
            shared = self._shared()
            self._parts = deal(self._own(), shared, rank=self.rank, ranks=self.ranks)
            # A range of a tensor that is not row-major is a copy, which the next step would leave behind.
            self._seen.take(keep=all(part.tensor.is_contiguous() for part in shared))
        return self._parts

    def wanted(self, stored: Mapping[str, Piece]) -> list[Part]:
        """Ask for all of it: every rank has a whole replica."""
        return wanted_replica(self.module, self.optimizer, stored, self.more)

    def _own(self) -> list[Part]:
        return [*buffer_parts(self.module), *(whole_part(name, tensor) for name, tensor in self.more.items())]

    def _shared(self) -> list[Part]:
        return [*parameter_parts(self.module), *optimizer_parts(self.module, self.optimizer)]


def wanted_replica(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, Piece],
    more: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Part]:
    """List what a replica reads: its whole model, and of the optimizer and of `more` what is stored.

    Raises:
        RefusedError: the checkpoint is of another model.
    """
    parts = [*buffer_parts(module), *parameter_parts(module)]
    require_same_names([part.piece.name for part in parts], stored)
    parts += stored_optimizer(module, optimizer, stored)
    parts += [whole_part(name, tensor) for name, tensor in more.items() if name in stored]
    for part in parts:
        require_same_form(part.piece, stored[part.piece.name])
    return parts


def stored_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Piece]) -> list[Part]:
    """List the stored state of the optimizer; what is not there yet is made, empty, as a first step would.

    Raises:
        RefusedError: it belongs to a parameter that this model does not train.
    """
    options = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    by_name = {name: each for name, each in module.named_parameters() if id(each) in options}
    torch_dtypes = {name: dtype for dtype, name in DTYPES.items()}
    parts = []
    for name, piece in stored.items():
        if not name.startswith(OPTIMIZER):
            continue
        require_trained(name, by_name)
        owner, key = owner_of(name)
        parameter = by_name[owner]
        group = options[id(parameter)]
        value = optimizer.state[parameter].get(key)
        if value is None:
            value = _room(parameter, key, piece, torch_dtypes[piece.dtype], group)
            optimizer.state[parameter][key] = value
        parts.append(whole_part(name, value))
    return parts


def _room(parameter: Tensor, key: str, piece: Piece, dtype: torch.dtype, group: Mapping[str, Any]) -> Tensor:
    """Make an empty tensor of an optimizer's state."""
    # PyTorch keeps a step count on the host, unless a kernel on the device reads it.
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    if piece.shape == tuple(parameter.shape) and key != "step":
        return torch.zeros_like(parameter, dtype=dtype)
    return torch.zeros(piece.shape, dtype=dtype, device="cpu" if on_host else parameter.device)


def require_same_names(wanted: Iterable[str], stored: Mapping[str, Piece]) -> None:
    """Compare the names of a model's parameters and buffers with the stored ones.

    Raises:
        RefusedError: they differ.
    """
    if other := sorted({name for name in stored if name.startswith(MODEL)} ^ set(wanted)):
        side = "only in the checkpoint" if other[0] in stored else "not in the checkpoint"
        raise RefusedError(f"the checkpoint is of another model: {other[0].removeprefix(MODEL)} is {side}; check model")


def owner_of(name: str) -> tuple[str, str]:
    """Split the name of an optimizer's state into that of its parameter and its key."""
    owner, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
    return owner, key


def require_trained(name: str, trained: Container[str]) -> None:
    """Check that a stored state of the optimizer belongs to a parameter that this model trains.

    Raises:
        RefusedError: it does not.
    """
    owner, key = owner_of(name)
    if owner not in trained:
        raise RefusedError(f"the checkpoint is of another model: it has {key} of {owner}; check model")


def require_same_form(wanted: Piece, found: Piece) -> None:
    """Compare a tensor's type and shape with the stored one's.

    Raises:
        RefusedError: they differ.
    """
    if (wanted.dtype, wanted.shape) != (found.dtype, found.shape):
        raise RefusedError(
            f"the checkpoint is of another model: {wanted.name} is {found.dtype} {list(found.shape)} there, "
            f"{wanted.dtype} {list(wanted.shape)} here; check model and precision"
        )
