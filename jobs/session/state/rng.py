"""States of random number generators: one record per rank, restored only on the same number of ranks.

rng/0/python  rng/0/numpy  rng/0/torch  rng/0/cuda     now
rng/0/epoch                                            at the start of the epoch (`jobs/session/order.py`)
"""

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from muster.jobs.checkpoint.pieces import whole
from muster.jobs.session.state.generator import numpy_state, python_state, set_numpy_state, set_python_state
from muster.jobs.session.state.leaves import Leaf
from muster.jobs.session.state.stored import Stored
from muster.jobs.tensors.parts import TensorPart

RNG: Final = "rng"
EPOCH: Final = "epoch"


class Generators:
    """The generators of one rank, and tensors to which their states are copied."""

    def __init__(self, rank: int, device: torch.device | None) -> None:
        self.rank = rank
        self.device = device if device is not None and device.type == "cuda" else None
        self.order: str | None = None  # of the samples of this epoch
        self._rooms = {key: state.clone() for key, state in self._now().items()}

    @property
    def parts(self) -> list[TensorPart]:
        """The states as tensors."""
        rooms = self._rooms if self.order is None else self._rooms | {EPOCH: _bytes(self.order.encode())}
        return [
            TensorPart(whole(self._path(self.rank, key), "U8", tuple(room.shape)), room) for key, room in rooms.items()
        ]

    def take(self) -> None:
        """Copy the current states into the tensors of `parts`."""
        for key, state in self._now().items():
            if key in self._rooms:
                self._rooms[key].copy_(state)

    def restore(self, stored: Stored, ranks: int) -> Sequence[str]:
        """Restore the states if the number of ranks is the same. Return messages about states not restored."""
        saved = {int(name.split("/")[1]) for name in stored.under(RNG)}
        if len(saved) != ranks:
            return [
                f"The random number generators are not restored: the checkpoint has those of {len(saved)} ranks, but "
                f"this run has {ranks} ranks. Random numbers differ from those of an uninterrupted run."
            ]
        if stored.piece(path := self._path(self.rank, EPOCH)) is not None:
            self.order = bytes(stored.tensor(path).tolist()).decode()
        missing = []
        for key, room in self._rooms.items():
            if stored.piece(path := self._path(self.rank, key)) is None:
                missing.append(key)
            else:
                self._set(key, stored.fill(Leaf(path, room)))
        return [f"The random number generator of {key} is not restored: the checkpoint has none." for key in missing]

    @staticmethod
    def _path(rank: int, key: str) -> str:
        return f"{RNG}/{rank}/{key}"

    def _now(self) -> dict[str, Tensor]:
        states = {"python": _bytes(python_state()), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules and sys.modules["numpy"].random.get_state()[0] == "MT19937":
            states["numpy"] = _bytes(numpy_state())
        if self.device is not None:
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _set(self, key: str, state: Tensor) -> None:
        if key == "torch":
            torch.set_rng_state(state)
        elif key == "cuda":
            assert self.device is not None
            torch.cuda.set_rng_state(state, self.device)
        else:
            restore: Any = set_python_state if key == "python" else set_numpy_state
            restore(bytes(state.tolist()))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
