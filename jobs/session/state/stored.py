"""The tensors of a checkpoint that is being restored, by name."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from muster.jobs.basics.errors import RefusedError
from muster.jobs.checkpoint.manifest import CheckpointManifest
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.session.state.leaves import Leaf
from muster.jobs.tensors.parts import TensorPart, dtype_of
from muster.jobs.tensors.reading import fill


class Stored:
    """The tensors of a checkpoint. `aliases` maps other names of tied tensors to the stored ones."""

    def __init__(self, manifest: CheckpointManifest, reader: CheckpointReader, aliases: Mapping[str, str]) -> None:
        self._reader = reader
        self._aliases = aliases
        self.pieces: dict[str, Piece] = {name: manifest.piece(name) for name in manifest.tensors}

    def piece(self, name: str) -> Piece | None:
        """Return a stored tensor as one piece, by any of its names; None if it is not stored."""
        return self.pieces.get(name) or self.pieces.get(self._aliases.get(name, ""))

    def under(self, name: str) -> list[str]:
        """List the stored tensors below a path, sorted."""
        return sorted(each for each in self.pieces if each.startswith(f"{name}/"))

    def require_known(self, name: str, known: Iterable[str]) -> None:
        """Check that all stored tensors below a path are known.

        Raises:
            RefusedError: if the checkpoint has an unknown tensor below this path.
        """
        if strange := sorted({*self.under(name)} - {*known}):
            raise RefusedError(
                f"state: {strange[0]} is in the checkpoint, but not in this program's {name!r}{_more(strange)}; "
                "restore with the program that saved it, or start a new run"
            )

    def fill(self, leaf: Leaf, *, casts: bool = False) -> Tensor:
        """Read this rank's part of a leaf into the leaf's memory; return the leaf's tensor.

        With `casts`, a tensor of another dtype is converted.

        Raises:
            RefusedError: if the checkpoint has no such tensor, or its dtype or shape differs.
        """
        found, (part, _) = self.piece(leaf.name), leaf.part()
        if found is None:
            raise RefusedError(
                f"state: {leaf.name} is not in the checkpoint; restore with the program that saved it, or start a new "
                "run"
            )
        wanted = part.piece
        if found.shape != wanted.shape or (found.dtype != wanted.dtype and not casts):
            raise RefusedError(
                f"state: {leaf.name} is {found.dtype} {list(found.shape)} in the checkpoint and {wanted.dtype} "
                f"{list(wanted.shape)} in this program; restore with the model that was saved, or start a new run"
            )
        room = part.tensor if found.dtype == wanted.dtype else torch.empty(wanted.extent, dtype=dtype_of(found))
        fill(TensorPart(replace(wanted, name=found.name, dtype=found.dtype), room), self._reader)
        if room is not part.tensor:
            with torch.no_grad():
                part.tensor.copy_(room)
        return leaf.tensor

    def tensor(self, name: str, live: Tensor | None = None, device: str | torch.device = "cpu") -> Tensor:
        """Return a stored tensor, in the memory of `live` if dtype and shape match, else in new memory."""
        piece = self.piece(name)
        if piece is None:
            raise KeyError(f"the tensor {name} is missing")
        dtype = dtype_of(piece)
        if live is None or (live.dtype, tuple(live.shape)) != (dtype, piece.shape):
            live = torch.empty(piece.shape, dtype=dtype, device=device if live is None else live.device)
        return self.fill(Leaf(name, live))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def as_mapping(value: Any, name: str, key: str) -> Mapping[str, Any]:
    """Check that a value of a checkpoint's JSON is an object; return it.

    Raises:
        RefusedError: if the value is not an object.
    """
    if not isinstance(value, Mapping):
        raise RefusedError(f"state: {name}: the checkpoint has no {key}; it was saved by another program")
    return value
