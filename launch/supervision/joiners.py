"""Track the ranks that are started besides those that train, to join them at a step boundary.

start ──→ waiting, waiting … all are ready ──→ `join`: the others stop after the same step
            └── one is lost, or late ─→ look again: those that are left may be ready
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from muster.launch.records.eventlog import EventLog
from muster.launch.supervision.in_place import Regrouping
from muster.launch.supervision.roster import Roster
from muster.launch.wire import messages as wire
from muster.launch.wire.records import RankReport

MOST_LOST: Final = 3  # joiners of one attempt that may fail; then it goes on without more

Send = Callable[[int, wire.ToAgent], None]


class Joiners:
    """The joiners of one attempt. Their numbers are valid until the next attempt adopts them.

    `join` is called when all of them are ready. It may do nothing, because the attempt is ending.
    """

    regroup: Callable[[], Regrouping]  # numbers the living ranks and the ready joiners anew

    def __init__(self, number: int, roster: Roster, log: EventLog, send: Send, join: Callable[[], None]) -> None:
        self.number = number
        self.roster = roster
        self.log = log
        self.send = send
        self.join = join
        self.numbers: set[int] = set()  # all joiners so far; those that were given up never count as training ranks
        self.ranks: set[int] = set()
        self.ready: set[int] = set()  # those that wait to be adopted
        self.lost = 0
        self.limit_s = self.deadline = math.inf  # for the joiners that are not ready (seconds; monotonic seconds)

    @property
    def nodes(self) -> set[int]:
        """The node ranks of nodes that have joiners."""
        return {self.roster.node_of[rank] for rank in self.ranks}

    @property
    def may_start(self) -> bool:
        """True if no joiner is still being started, and not too many have failed."""
        return self.ready >= self.ranks and self.lost < MOST_LOST

    def start(self, starts: Mapping[int, wire.Start], regroup: Callable[[], Regrouping], limit_s: float) -> None:
        """Start joiners. `starts`: {node rank: its order}. `limit_s`: within this time they must be ready."""
        self.regroup, self.limit_s, self.deadline = regroup, limit_s, time.monotonic() + limit_s
        for node_rank, start in starts.items():
            self.roster.swept.discard(node_rank)
            for each in start.ranks:
                self.roster.node_of[each["rank"]] = node_rank
                self.ranks.add(each["rank"])
        self.numbers |= self.ranks
        self.log.event("joining", attempt=self.number, joiners=sorted(self.ranks))
        for node_rank, start in starts.items():
            self.send(node_rank, start)

    def report(self, rank: int, report: RankReport) -> None:
        """Handle a joiner's report."""
        if report["report"] == "waiting" and rank in self.ranks:
            self.ready.add(rank)
            self.look()

    def look(self) -> None:
        """Let the joiners join if all are ready, and the job can use them. Call this whenever they have changed."""
        if self.ranks and self.ready >= self.ranks and not self.ready.isdisjoint(self.regroup().adopted.values()):
            self.join()

    def lose(self, ranks: Collection[int], why: str) -> None:
        """Record the end of joiners. Ignore those that were given up before."""
        for rank in self.ranks.intersection(ranks):
            self.ranks.discard(rank)
            self.ready.discard(rank)
            self.lost += 1
            self.log.event("not_joined", attempt=self.number, rank=rank, why=why)

    def lose_node(self, node_rank: int, why: str) -> None:
        """Record the end of a node's joiners."""
        self.lose([rank for rank in self.ranks if self.roster.node_of[rank] == node_rank], why)

    def tick(self, now: float) -> None:
        """Give up joiners that are not ready in time, and end them, unless other ranks run on their node."""
        if now <= self.deadline or self.ready >= self.ranks:
            return
        late = self.ranks - self.ready
        nodes = {self.roster.node_of[rank] for rank in late}
        self.lose(late, f"it was not ready within {self.limit_s:g} s (start_timeout_s)")
        for node_rank in nodes - self.nodes - {self.roster.node_of[rank] for rank in self.roster.running}:
            self.send(node_rank, wire.StopRanks(self.number, 0.0))
        self.look()
