"""Track the ranks that are started besides those that train, to join them at a step boundary."""

from collections.abc import Mapping
from typing import Final

from muster.launch.records.eventlog import EventLog
from muster.launch.supervision.roster import Roster
from muster.launch.wire import messages as wire

MOST_LOST: Final = 3  # joiners of one attempt that may fail; then it goes on without more


class Joiners:
    """The joiners of one attempt. Their numbers are valid until the next attempt adopts them."""

    def __init__(self, number: int, roster: Roster, log: EventLog) -> None:
        self.number = number
        self.roster = roster
        self.log = log
        self.ranks: set[int] = set()
        self.ready: set[int] = set()  # those that wait to be adopted
        self.lost = 0

    @property
    def are_ready(self) -> bool:
        """True if there are joiners, and all of them wait to be adopted."""
        return bool(self.ranks) and self.ready >= self.ranks

    @property
    def may_start(self) -> bool:
        """True if no joiner exists, and not too many have failed."""
        return not self.ranks and self.lost < MOST_LOST

    def begin(self, starts: Mapping[int, wire.Start]) -> None:
        """Record the joiners that are being started. `starts`: {node rank: its order}."""
        for node_rank, start in starts.items():
            for each in start.ranks:
                self.roster.node_of[each["rank"]] = node_rank
                self.ranks.add(each["rank"])
        self.log.event("joining", attempt=self.number, joiners=sorted(self.ranks))

    def lose(self, rank: int, why: str) -> None:
        """Record the end of a joiner."""
        self.ranks.discard(rank)
        self.ready.discard(rank)
        self.lost += 1
        self.log.event("not_joined", attempt=self.number, rank=rank, why=why)

    def lose_node(self, node_rank: int, why: str) -> None:
        """Record the end of a node's joiners."""
        for rank in [rank for rank in self.ranks if self.roster.node_of[rank] == node_rank]:
            self.lose(rank, why)
