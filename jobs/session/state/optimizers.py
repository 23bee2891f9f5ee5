"""The state of a `torch.optim.Optimizer`: its tensors under the names of the parameters that they belong to.

    optimizer/fc.weight/exp_avg      for the parameter fc.weight of the registered module
    optimizer/3/exp_avg              for the fourth parameter, if no registered module has it

Learning rates and other settings of the groups are stored as JSON. The assignment of parameters to groups is not
stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.session.state.leaves import Leaf, Leaves, is_dtensor
from muster.jobs.session.state.modules import ModuleState
from muster.jobs.session.state.objects import Registered
from muster.jobs.session.state.stored import Stored, as_mapping
from muster.jobs.session.state.trees import Encoder, decode
from muster.jobs.tensors.modules import ON_HOST, room_for
from muster.jobs.tensors.parts import DTYPES, dtype_of

GROUPS: Final = "param_groups"
NOT_SETTINGS: Final = {"params", "param_names"}
KERNELS: Final = {
    "foreach",
    "fused",
    "capturable",
    "differentiable",
}  # settings of this program that are never restored
MASTER: Final = "master"  # key in muster.zero of the float32 copy of a 16-bit parameter


class OptimizerState(Registered):
    """An optimizer with PyTorch's own `state_dict`."""

    kind = "optimizer"

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, modules: Sequence[ModuleState]) -> None:
        super().__init__(name)
        self.optimizer = optimizer
        self.modules = modules

    def parameters(self) -> Iterator[tuple[str, Tensor, Leaf | None, Mapping[str, Any]]]:
        """Yield each parameter as (name within this optimizer, tensor, leaf, parameter group)."""
        owners = self._owners()
        for place, (parameter, group) in enumerate(self._grouped()):
            owner = next((each for each in owners if id(parameter) in each.parameters), None)
            if owner is None:
                yield f"{self.name}/{place}", parameter, None, group
                continue
            leaf = owner.parameters[id(parameter)]
            yield self._path(leaf.name, owner, owners), parameter, leaf, group

    def _owners(self) -> list[ModuleState]:
        """List the modules that own some of the parameters."""
        mine = {id(parameter) for parameter, _ in self._grouped()}
        return [owner for owner in self.modules if not mine.isdisjoint(owner.parameters)]

    def _path(self, name: str, owner: ModuleState, owners: Sequence[ModuleState]) -> str:
        """Return the path of a parameter from its stored name; with a single module, the module's name is dropped."""
        return f"{self.name}/{name if len(owners) > 1 else name.removeprefix(f'{owner.name}/')}"

    def _grouped(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, group

    def capture(self, encoder: Encoder, leaves: Leaves) -> Any:
        """Add the tensors to `leaves`; return the settings of the groups and non-tensor state as JSON."""
        groups = [
            encoder.encode(self._settings(group), f"{self.name}/{GROUPS}/{place}")
            for place, group in enumerate(self.optimizer.param_groups)
        ]
        return {"groups": groups, "values": self.capture_state(encoder, leaves)}

    @staticmethod
    def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in NOT_SETTINGS}

    def capture_state(self, encoder: Encoder, leaves: Leaves) -> dict[str, Any]:
        """Add the tensors of the parameters' states; return the other values by path."""
        for key in self.optimizer.state:
            if not isinstance(key, Tensor):
                raise RefusedError(
                    f"state: {self.name}: the optimizer's state has the key {key!r}, which is not a parameter and "
                    "cannot be saved; keep such values in the parameter groups"
                )
        values: dict[str, Any] = {}
        for path, parameter, leaf, _ in self.parameters():
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    leaves.add(self.leaf_of(f"{path}/{key}", value, parameter, leaf))
                elif leaf is not None and leaf.piece is not None:
                    raise RefusedError(f"state: {path}/{key}: a pipeline's optimizer can store tensors only")
                else:
                    values.setdefault(path, {})[key] = encoder.encode(value, f"{path}/{key}")
        return values

    def leaf_of(self, path: str, value: Tensor, parameter: Tensor, leaf: Leaf | None) -> Leaf:
        """Return the leaf of a state tensor, which is split among ranks like its parameter.

        Raises:
            RefusedError: if a sharded parameter has a state tensor that is not a DTensor.
        """
        if is_dtensor(parameter) and not is_dtensor(value) and value.dim():
            raise RefusedError(f"state: {path}: the state of a DTensor parameter must be a DTensor or a single number")
        if leaf is not None and leaf.piece is not None:
            return Leaf(path, value, piece=Piece(path, DTYPES[value.dtype], tuple(value.shape)), answers=leaf.answers)
        return Leaf(path, value, dealt=True, compared=True)

    def restore(self, stored: Stored, tree: Any) -> None:
        """Restore the settings of the groups, then the states of the parameters."""
        groups = as_mapping(tree, self.name, "optimizer").get("groups", ())
        if len(groups) != len(self.optimizer.param_groups):
            raise RefusedError(
                f"state: {self.name} has {len(groups)} parameter groups in the checkpoint and "
                f"{len(self.optimizer.param_groups)} in this program; build the optimizer with the saved groups"
            )
        for place, (group, record) in enumerate(zip(self.optimizer.param_groups, groups, strict=True)):
            self._restore_group(stored, group, record, f"{self.name}/{GROUPS}/{place}")
        self.restore_state(stored, as_mapping(tree.get("values"), self.name, "values"))

    def _restore_group(self, stored: Stored, group: dict[str, Any], record: Any, path: str) -> None:
        live = {f"{path}/{key}": value for key, value in group.items() if isinstance(value, Tensor)}
        settings = decode(record, lambda name: stored.tensor(name, live.get(name)), path)
        group.update({key: value for key, value in settings.items() if key not in KERNELS})

    def restore_state(self, stored: Stored, values: Mapping[str, Any]) -> None:
        """Fill the states in place. Create missing tensors, and drop those that the checkpoint does not have."""
        by_path = self._stored_keys(stored, values)
        for path, parameter, leaf, group in self.parameters():
            state, pieces = self.optimizer.state[parameter], by_path.get(path, {})
            for key in state.keys() - pieces.keys() - values.get(path, {}).keys():
                del state[key]
            for key, piece in pieces.items():
                if key == MASTER and MASTER not in state:
                    continue  # this optimizer has no float32 copy: it updates the parameter itself
                casts = MASTER in pieces and MASTER not in state and piece.shape == tuple(parameter.shape)
                wanted = replace(piece, dtype=DTYPES[parameter.dtype]) if casts and key not in ON_HOST else piece
                state[key] = self._room(f"{path}/{key}", state.get(key), parameter, key, wanted, group)
                stored.fill(self.leaf_of(f"{path}/{key}", state[key], parameter, leaf), casts=casts)
            for key, record in values.get(path, {}).items():
                found = partial(stored.tensor, device=parameter.device)
                state[key] = decode(record, found, f"{path}/{key}")
            if not state:
                del self.optimizer.state[parameter]

    def _stored_keys(self, stored: Stored, values: Mapping[str, Any]) -> dict[str, dict[str, Piece]]:
        """Return the stored tensors of each parameter by key.

        Raises:
            RefusedError: if a stored tensor belongs to no parameter of this optimizer.
        """
        owners = self._owners()
        known, found = {path for path, *_ in self.parameters()}, dict[str, dict[str, Piece]]()
        for owner in owners:  # a pipeline's checkpoint also contains the parameters of other ranks
            known |= {self._path(each, owner, owners) for each in owner.known_names()}
        for name in stored.under(self.name):
            path, _, key = name.rpartition("/")
            if name.startswith(f"{self.name}/{GROUPS}/") or any(name.startswith(f"{each}/") for each in values):
                if path not in known:
                    continue
            elif path not in known:
                stored.require_known(self.name, ())
            found.setdefault(path, {})[key] = stored.pieces[name]
        return found

    def _room(self, path: str, now: Any, parameter: Tensor, key: str, piece: Piece, group: Mapping[str, Any]) -> Tensor:
        """Return the tensor to fill: the existing one, or a new one like that of the optimizer's first step."""
        if isinstance(now, Tensor) and (now.dtype, tuple(now.shape)) == (dtype_of(piece), piece.shape):
            return now
        is_like_it = piece.shape == tuple(parameter.shape) and key not in ON_HOST
        if piece.shape and is_dtensor(parameter) and not is_like_it:
            raise RefusedError(
                f"state: {path}: a state of shape {list(piece.shape)} cannot be created for a DTensor parameter of "
                f"shape {list(parameter.shape)}; run one step before the restore"
            )
        return room_for(parameter, key, piece, group)
