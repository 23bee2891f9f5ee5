"""The state of plain values, and of objects with `state_dict` and `load_state_dict`, such as schedulers and samplers.

This module uses torch only if the program has imported it already.
"""

import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from muster.jobs.basics.errors import RefusedError
from muster.jobs.session.state.trees import Encoder, decode

if TYPE_CHECKING:
    from muster.jobs.session.state.leaves import Leaves
    from muster.jobs.session.state.stored import Stored


class Registered(ABC):
    """One registered object. `stored` and `leaves` are None if the program has not imported torch.

    `kind` is saved with the object. A checkpoint that has an object of another kind under this name is refused.
    """

    kind: str

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def capture(self, encoder: Encoder, leaves: "Leaves") -> Any:
        """Add this rank's tensors to `leaves`; return everything else as JSON."""

    @abstractmethod
    def restore(self, stored: "Stored", tree: Any) -> None:
        """Restore the tensors from a checkpoint, and everything else from the JSON that `capture` returned."""

    def finish(self) -> None:  # noqa: B027 - most objects have nothing left to do
        """Finish the restore, after all objects have been restored."""


class ObjectState(Registered):
    """An object with `state_dict` and `load_state_dict`."""

    kind = "object"

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name)
        self.owner = owner

    def value(self) -> Any:
        """Return the tree to store."""
        try:
            return self.owner.state_dict()
        except (RuntimeError, NotImplementedError) as error:
            raise RefusedError(f"state: {self.name}: its state_dict() failed: {error!s:.300}") from error

    def capture(self, encoder: Encoder, leaves: "Leaves") -> Any:
        """Return the tree as JSON; the encoder extracts its tensors."""
        return encoder.encode(self.value(), self.name)

    def restore(self, stored: "Stored", tree: Any) -> None:
        """Read the tree, into the memory of the object's tensors if they fit, and pass it to the object."""
        if "torch" not in sys.modules:
            self.take(decode(tree, _no_tensor, self.name))
            return
        from muster.jobs.session.state.leaves import Leaves

        leaves = Leaves()
        self.capture(Encoder(leaves.leaf), leaves)
        live = {leaf.name: leaf.tensor for leaf in leaves}
        self.take(decode(tree, lambda name: stored.tensor(name, live.get(name)), self.name))

    def take(self, value: Any) -> None:
        """Pass the restored tree to the object."""
        self.owner.load_state_dict(value)


class ValueState(ObjectState):
    """A plain value. Restoring replaces it."""

    kind = "value"

    def value(self) -> Any:
        """Return the value."""
        return self.owner

    def take(self, value: Any) -> None:
        """Replace the value."""
        self.owner = value


def plain(name: str, value: object) -> Registered:
    """Wrap a plain value, or an object with `state_dict` and `load_state_dict`.

    Raises:
        RefusedError: if the object can be saved but not restored, or is a class.
    """
    saves, loads = (callable(getattr(value, each, None)) for each in ("state_dict", "load_state_dict"))
    if isinstance(value, type) and saves:
        raise RefusedError(f"state: {name} is the class {value.__name__}; register an instance of it")
    if saves != loads:
        missing = "load_state_dict" if saves else "state_dict"
        raise RefusedError(f"state: {name}: a {type(value).__name__} has no {missing}(), so it cannot be restored")
    return ObjectState(name, value) if saves else ValueState(name, value)


def _no_tensor(name: str) -> Any:
    raise KeyError(f"{name} is a tensor, and this program has not imported torch")
