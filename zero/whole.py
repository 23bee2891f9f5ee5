"""Parameters that are always whole (stages 1 and 2): they are gathered after a step, and each forward waits for them as
late as possible.

    step   gather  [1 ][2 ][3 ]
    forward          [1 ][2 ][3 ]             each unit waits for its own parameters; without units, the forward
                                              waits for all parameters before it begins
    late          step | gather  [1 ][2 ][3 ]          the gathers begin with the forward, so that one CUDA graph
                         forward   [1 ][2 ][3 ]        contains them and all their uses

A module of a unit waits for the whole unit before it runs. Any other module waits for those of its parameters that are
in no unit, so that a submodule waits even if it is called directly.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from muster.ddp.compiler import outside
from muster.ddp.means import Wait
from muster.zero.absent import Expect
from muster.zero.flat import FlatParameters
from muster.zero.gather import Gather
from muster.zero.hooks import Hook, around, is_compiled, within_compiled
from muster.zero.units import Unit


class Residency(ABC):
    """A policy for when parameters are gathered and freed."""

    late = False  # True: gathers begin when parameters are needed, not after the step

    @abstractmethod
    def forward(self) -> AbstractContextManager[None]:
        """Return the context for a forward of the wrapper."""

    @abstractmethod
    def all_open(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters are whole. A collective."""

    @abstractmethod
    def spread(self, flat_parameters: Sequence[FlatParameters]) -> None:
        """Record that shards have changed, so that parameters are gathered again before they are used."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for gathers that are in progress between forwards."""

    def changed(self, flat_parameters: Sequence[FlatParameters]) -> None:
        """Record that something else than `spread` has changed shards, so that a `late` gather follows."""
        raise NotImplementedError  # only parameters that are always whole are gathered late

    def remove(self) -> None:  # noqa: B027 - some have no hooks
        """Remove all hooks, because the wrapper was deleted or its module was unwrapped."""


class Unwrapped(Residency):
    """The residency after `unwrap()`: every use of the wrapper raises an error, including steps of its optimizers."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("this wrapper was unwrapped; use the module that unwrap() returned, with a new optimizer")

    forward = all_open = spread = _refuse

    def synchronize(self) -> None:
        """Do nothing, because no gather is in progress."""


def other_thread(unit: str) -> RuntimeError:
    """Return the error for a unit that runs on another thread than the forward of its wrapper."""
    return RuntimeError(
        f"{unit}: runs on another thread than the forward of its wrapper, as stages of a Pipe do, but gathers of "
        "several threads have no fixed order; use stage=2"
    )


def in_backward() -> bool:
    """Return whether a backward is running. If so, any forward is a recomputation by activation checkpointing."""
    return torch._C._current_autograd_node() is not None


Waiting = Callable[[FlatParameters, Wait], None]  # waits, and notifies observers of the wait


class AlwaysWhole(Residency):
    """Flat parameters that are whole except between a step and the following forward.

    Hooks of the module refer to this object, so `waiting` must have only a weak reference to the wrapper.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        flat_parameters: Sequence[FlatParameters],
        gather: Gather,
        waiting: Waiting,
    ) -> None:
        self.flat_parameters = flat_parameters
        self._gather = gather
        self._waiting = waiting
        self._under_way: dict[int, tuple[FlatParameters, Wait]] = {}  # gathers in progress, by id of the flat parameter
        self._changed: Sequence[FlatParameters] = ()  # stepped, and to be gathered late
        me = weakref.WeakMethod(self.synchronize)
        self._expected = {
            id(flat_parameter): Expect(flat_parameter.parameters, me) for flat_parameter in flat_parameters
        }
        self._handles = [
            handle
            for part, needed in _needs(module, units, flat_parameters)
            for handle in around(part, partial(self._before, needed))
        ]
        synchronize, adopt = Hook(lambda *_: self.synchronize()), Hook(lambda *_: self._adopt())
        self._handles += [
            module.register_state_dict_pre_hook(synchronize),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(synchronize),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(adopt),  # type: ignore[no-untyped-call]
        ]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Do nothing, because the hooks wait, even in forwards that bypass the wrapper."""
        yield

    @contextmanager
    def all_open(self) -> Iterator[None]:
        self.synchronize()
        yield

    def spread(self, flat_parameters: Sequence[FlatParameters]) -> None:
        """Begin to gather the stepped parameters, in the order in which the forward needs them."""
        if self.late:
            self.changed(flat_parameters)
        else:
            self._start(flat_parameters)

    def changed(self, flat_parameters: Sequence[FlatParameters]) -> None:
        if not self._changed:  # something has read the parameters since the last step
            self._changed, self._under_way = flat_parameters, {}
            for flat_parameter in flat_parameters:
                self._expected[id(flat_parameter)].begin()

    def _start(self, flat_parameters: Sequence[FlatParameters]) -> None:
        self._gather.written()
        for flat_parameter in reversed(flat_parameters):
            flat_parameter.outdate()
            self._under_way[id(flat_parameter)] = (
                flat_parameter,
                self._gather.start(flat_parameter, flat_parameter.shard, flat_parameter.full),
            )
            self._expected[id(flat_parameter)].begin()
        self._gather.started()

    def _start_late(self) -> None:
        """Begin the gathers that `late` has postponed."""
        if self._changed:
            changed, self._changed = self._changed, ()
            self._start(changed)

    def synchronize(self) -> None:
        self._start_late()
        if self._under_way:
            self._before([flat_parameter for flat_parameter, _ in self._under_way.values()])

    def remove(self) -> None:
        """Wait for gathers, and remove the hooks.

        Errors of a broken group are ignored, because they are reported elsewhere.
        """
        self._changed = ()  # beginning a gather now could wait for ranks that have ended
        with suppress(RuntimeError):
            self.synchronize()
        for handle in self._handles:
            handle.remove()
        for flat_parameter in self.flat_parameters:
            flat_parameter.unsend()

    def _before(self, flat_parameters: Sequence[FlatParameters], *_: Any) -> None:
        """Wait for the flat parameters that a forward needs."""
        under_way = self._under_way
        if self._changed or (under_way and any(id(each) in under_way for each in flat_parameters)):
            outside(self._wait_for, flat_parameters)

    def _wait_for(self, flat_parameters: Sequence[FlatParameters]) -> None:
        self._start_late()
        for flat_parameter in flat_parameters:
            if (waited := self._under_way.get(id(flat_parameter))) is not None:
                self._expected[id(flat_parameter)].end()
                del self._under_way[id(flat_parameter)]
                self._waiting(*waited)

    def _adopt(self) -> None:
        """Copy values that were loaded directly into the module into shards and masters."""
        for flat_parameter in self.flat_parameters:
            flat_parameter.adopt()


def _needs(
    module: nn.Module, units: Sequence[Unit], flat_parameters: Sequence[FlatParameters]
) -> Iterator[tuple[nn.Module, list[FlatParameters]]]:
    """Yield modules, each with the flat tensors that it must wait for: a compiled one for all that its parts use."""
    flat_of = {id(each): flat_parameter for flat_parameter in flat_parameters for each in flat_parameter.parameters}
    unit_of = {id(part): unit for unit in units for each in unit.modules for part in each.modules()}
    in_units = {id(each) for unit in units if not unit.is_root for _, each in unit.parameters}
    within = within_compiled(module)
    for part in module.modules():
        if id(part) in within:
            continue
        needed = [each for each in part.parameters() if is_compiled(part) or id(each) not in in_units]
        if (unit := unit_of.get(id(part))) is not None:
            needed += [each for _, each in unit.parameters]
        own = {id(flat_of[id(each)]): flat_of[id(each)] for each in needed}
        if own:
            yield part, list(own.values())
