"""One unit's flat parameters, gathered and freed together."""

from collections.abc import Callable, Sequence
from typing import Any

from muster.ddp.means import Wait
from muster.zero.flat import FlatParameters
from muster.zero.gather import Gather
from muster.zero.units import Unit

Waiting = Callable[[FlatParameters, Wait], None]  # waits, and tells who wants to know


class Window:
    """One unit's flat parameters, there or not."""

    def __init__(self, unit: Unit, homes: Sequence[FlatParameters], gather: Gather, waiting: Waiting) -> None:
        self.unit = unit
        self.homes = homes
        self.buckets: list[Any] = []  # of its gradients
        self.is_whole = False
        self.is_running = False  # True: from the beginning of its first module to the end of its last
        self.run = 0  # which one of the forward it is in, or was last
        self._gather = gather
        self.wait_for = waiting
        self._under_way: list[tuple[FlatParameters, Wait]] = []

    def begin(self) -> None:
        """Start to gather, if nobody has."""
        if self.is_whole or self._under_way:
            return
        for home in self.homes:
            home.take_memory()
            self._under_way.append((home, self._gather.start(home, home.sent(), home.full)))

    def open(self) -> None:
        """Return when the parameters are there."""
        if self.is_whole:
            return
        self.begin()
        for home, wait in self._under_way:
            self.wait_for(home, wait)
            home.arrive()
        self._under_way.clear()
        self.is_whole = True

    def close(self) -> None:
        """Free them; those under way are waited for first."""
        if self._under_way:
            self.open()
        if self.is_whole:
            self.is_whole = False
            for home in self.homes:
                home.free()

    def lose(self) -> None:
        """Hear that nobody will gather them any more."""
        for home in self.homes:
            home.lose()
