"""A player as its conductor holds it: a forked process (jobs/world/forked.py) that tells which cell or pair it is at.

What becomes of it is an `Ending`, which conductors exchange as JSON.
"""

from dataclasses import asdict, dataclass
from typing import Any

from muster.jobs.world.forked import Ended, Forked, Work


@dataclass(frozen=True)
class Ending(Ended):
    """How one rank's player ended, as its conductor saw it."""

    rank: int = 0
    cell: int | None = None  # it was at
    pair: tuple[int, int] | None = None  # of nodes, which it measured last

    @property
    def is_cause(self) -> bool:
        """True when it failed for a reason of its own."""
        return self.how in ("raised", "died") and not self.lost


class Player(Forked):
    """The process that plays; made by forking this one, which must have no threads."""

    def __init__(self, play: Work) -> None:
        self.cell: int | None = None
        self.pair: tuple[int, int] | None = None
        super().__init__(play)

    def note(self, message: dict[str, Any]) -> None:
        """Take in which cell it enters, and which nodes it measures."""
        self.cell = message.get("enter", self.cell)
        self.pair = message.get("meet", self.pair)

    def end(self, rank: int, *, silent: bool) -> Ending:
        """Bury it, killed first if it is `silent`; say how it ended. Its standard error goes to this process's."""
        return Ending(rank=rank, cell=self.cell, pair=self.pair, **asdict(self.buried(silent=silent)))
