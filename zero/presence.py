"""When parameters are whole: what the wrappers ask of whoever knows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from zero.flat import FlatParameters


class Presence(ABC):
    """The times at which parameters are there."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """Return the context of a forward of the wrapper."""

    @abstractmethod
    def all_open(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters are there: a collective."""

    @abstractmethod
    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Hear that shards have changed: parameters must be whole and new before they are used next."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for what is under way outside a forward."""

    def remove(self) -> None:  # noqa: B027 - some leave nothing
        """Leave the module as it is without a wrapper: that has been deleted."""


class Hook:
    """A hook of a module that its copies do without: `deepcopy` and `pickle` take a module's hooks along."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> Any:
        """Call what was given."""
        return self.call(*given)

    def __reduce__(self) -> Any:
        """Become a hook that does nothing."""
        return Hook, (_nothing,)


def _nothing(*given: Any) -> None:
    pass
