"""Parameters that are always whole (stages 1 and 2): gathered after a step, and waited for as late as is safe.

step   gather  [1 ][2 ][3 ]
forward          [1 ][2 ][3 ]             each unit waits for its own parameters; without units, all wait at once

A module of a unit waits for the whole unit. Any other module waits for its parameters that are in no unit, so that a
submodule called on its own waits, too.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from muster.ddp.means import Wait
from muster.zero.absent import Expect
from muster.zero.flat import FlatParameters
from muster.zero.gather import Gather
from muster.zero.units import Unit


class Presence(ABC):
    """Controls when parameters are gathered."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """Return the context for a forward of the wrapper."""

    @abstractmethod
    def all_open(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters are whole. A collective."""

    @abstractmethod
    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Note that shards have changed: parameters must be gathered again before they are used."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for gathers in progress outside a forward."""

    def remove(self) -> None:  # noqa: B027 - some have no hooks
        """Remove all hooks, because the wrapper was deleted."""


class Gone(Presence):
    """Refuses every use of a wrapper whose module was unwrapped, including steps of its optimizers."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("this wrapper has given its module back; use the result of unwrap(), with a new optimizer")

    forward = all_open = spread = _refuse

    def synchronize(self) -> None:
        """Do nothing: no gather is in progress."""


class Hook:
    """A hook of a module that does nothing in copies: `deepcopy` and `pickle` also copy a module's hooks."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *given: Any) -> Any:
        """Call the wrapped function."""
        return self.call(*given)

    def __reduce__(self) -> Any:
        """Copy and pickle as a hook that does nothing."""
        return Hook, (_nothing,)


def _nothing(*given: Any) -> None:
    pass


def other_thread(unit: str) -> RuntimeError:
    """Return the error for a unit that runs on another thread than the forward of its wrapper."""
    return RuntimeError(
        f"{unit}: runs on another thread than the forward of its wrapper, as stages of a Pipe do, but gathers of "
        "several threads have no order; shard less: stage=2"
    )


def in_backward() -> bool:
    """Return whether a backward is running. If so, any forward is a recomputation for a checkpoint."""
    return torch._C._current_autograd_node() is not None


Waiting = Callable[[FlatParameters, Wait], None]  # waits, and notifies observers of the wait


class AlwaysWhole(Presence):
    """Flat parameters that are whole except between a step and the following forward.

    Hooks of the module hold this object, so `waiting` must not hold a strong reference to the wrapper.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        homes: Sequence[FlatParameters],
        gather: Gather,
        waiting: Waiting,
    ) -> None:
        self.homes = homes
        self._gather = gather
        self._waiting = waiting
        self._under_way: dict[int, tuple[FlatParameters, Wait]] = {}  # gathers in progress, by id
        me = weakref.WeakMethod(self.synchronize)
        self._expected = {id(home): Expect(home.parameters, me) for home in homes}
        self._handles = [
            part.register_forward_pre_hook(Hook(partial(self._before, needed)), prepend=True)
            for part, needed in _needs(module, units, homes)
        ]
        synchronize, adopt = Hook(lambda *_: self.synchronize()), Hook(lambda *_: self._adopt())
        self._handles += [
            module.register_state_dict_pre_hook(synchronize),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(synchronize),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(adopt),  # type: ignore[no-untyped-call]
        ]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Do nothing: hooks wait, including in forwards that bypass the wrapper."""
        yield

    @contextmanager
    def all_open(self) -> Iterator[None]:
        self.synchronize()
        yield

    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Begin to gather what was stepped, in the order in which the forward needs it."""
        self._gather.written()
        for home in reversed(homes):
            home.outdate()
            self._under_way[id(home)] = (home, self._gather.start(home, home.shard, home.full))
            self._expected[id(home)].begin()
        self._gather.started()

    def synchronize(self) -> None:
        if self._under_way:
            self._before([home for home, _ in self._under_way.values()])

    def remove(self) -> None:
        """Wait, and remove the hooks. Errors of a broken group are reported elsewhere."""
        with suppress(RuntimeError):
            self.synchronize()
        for handle in self._handles:
            handle.remove()
        for home in self.homes:
            home.unsend()

    def _before(self, homes: Sequence[FlatParameters], *_: Any) -> None:
        """Wait for some flat parameters, before a forward that needs them."""
        if self._under_way:
            for home in homes:
                if (waited := self._under_way.get(id(home))) is not None:
                    self._expected[id(home)].end()
                    del self._under_way[id(home)]
                    self._waiting(*waited)

    def _adopt(self) -> None:
        """Accept values that were loaded without the wrapper."""
        for home in self.homes:
            home.adopt()


def _needs(
    module: nn.Module, units: Sequence[Unit], homes: Sequence[FlatParameters]
) -> Iterator[tuple[nn.Module, list[FlatParameters]]]:
    """Yield modules, each with the flat tensors that it must wait for."""
    home_of = {id(each): home for home in homes for each in home.parameters}
    unit_of = {id(part): unit for unit in units for each in unit.modules for part in each.modules()}
    in_units = {id(each) for unit in units if not unit.is_root for _, each in unit.parameters}
    for part in module.modules():
        needed = [each for each in part.parameters() if id(each) not in in_units]
        if (unit := unit_of.get(id(part))) is not None:
            needed += [each for _, each in unit.parameters]
        own = {id(home_of[id(each)]): home_of[id(each)] for each in needed}
        if own:
            yield part, list(own.values())
