"""When parameters are whole: what the wrappers ask of whoever knows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

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
