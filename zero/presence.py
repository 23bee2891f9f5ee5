"""When parameters are whole: what the wrappers ask of whoever knows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from muster.zero.flat import FlatParameters


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


class Gone(Presence):
    """Of a wrapper that has given its module back."""

    def forward(self) -> AbstractContextManager[None]:
        """Refuse."""
        raise self._error()

    def all_open(self) -> AbstractContextManager[None]:
        """Refuse."""
        raise self._error()

    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Refuse a step of an optimizer that was the wrapper's."""
        raise self._error()

    def synchronize(self) -> None:
        """Do nothing: nothing is under way."""

    def _error(self) -> RuntimeError:
        return RuntimeError(
            "this wrapper has given its module back: use what unwrap() returned, with an optimizer of its own"
        )


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


def other_thread(unit: str) -> RuntimeError:
    """Return what says that a unit runs on another thread than the forward of its wrapper."""
    return RuntimeError(
        f"{unit}: runs on another thread than the forward of its wrapper, as stages of a Pipe do, and gathers of "
        "several threads have no order; share out less: stage=2"
    )


def in_backward() -> bool:
    """True while autograd works on a node: what runs then is forwarded again, for a checkpoint."""
    return torch._C._current_autograd_node() is not None
