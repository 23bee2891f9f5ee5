"""Parameters that are always there (stages 1 and 2): gathered after a step, waited for as late as is safe.

step   gather  [1 ][2 ][3 ]
forward          [1 ][2 ][3 ]             each unit waits for its own parameters; without units all wait at once
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from ddp.means import Wait
from zero.flat import FlatParameters
from zero.gather import Gather
from zero.presence import Presence
from zero.units import Unit

Waiting = Callable[[FlatParameters, Wait], None]  # waits, and tells who wants to know


class AlwaysWhole(Presence):
    """Flat parameters that are whole but for the time between a step and the forward that follows."""

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
        self._under_way: dict[int, tuple[FlatParameters, Wait]] = {}  # by identity
        home_of = {id(each): home for home in homes for each in home.parameters}
        for unit in units:
            own = list({id(home_of[id(each)]): home_of[id(each)] for _, each in unit.parameters}.values())
            for part in unit.modules or (module,):
                part.register_forward_pre_hook(partial(self._before, own), prepend=True)
        module.register_state_dict_pre_hook(lambda *_: self.synchronize())  # type: ignore[no-untyped-call]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Do nothing: hooks wait, those of forwards past the wrapper too."""
        yield

    @contextmanager
    def all_open(self) -> Iterator[None]:
        """Wait for all parameters."""
        self.synchronize()
        yield

    def spread(self, homes: Sequence[FlatParameters]) -> None:
        """Begin to gather what was stepped, what the forward needs first, first."""
        for home in reversed(homes):
            self._under_way[id(home)] = (home, self._gather.start(home, home.shard, home.full))

    def synchronize(self) -> None:
        """Wait for all that is under way."""
        for home, wait in list(self._under_way.values()):
            self._waiting(home, wait)
            del self._under_way[id(home)]

    def _before(self, homes: Sequence[FlatParameters], module: nn.Module, inputs: Any) -> None:
        if self._under_way:
            for home in homes:
                if (waited := self._under_way.get(id(home))) is not None:
                    self._waiting(*waited)
                    del self._under_way[id(home)]
