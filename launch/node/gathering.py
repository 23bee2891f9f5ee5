"""Join messages of a node's ranks into one, so that the supervisor of 100,000 ranks reads one message per node.

    rank 0 arrived ┐
    rank 2 arrived ├─ the last one of the node ──→ Report(ranks 0, 2, 1)      or, GATHER_S after the first one, those
    rank 1 arrived ┘                                                          that have arrived

Only messages for which the supervisor waits until every rank has sent one are joined: the arrival at the rendezvous,
its end, and the end of ranks that were ordered to stop.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from muster.launch.wire.messages import Exited, Exits, FromAgent, Report
from muster.launch.wire.records import RankReport

GATHER_S: Final = 0.25
MOST_EXITS: Final = 16  # in one message: each has up to 20 lines of its rank, and a message may have 8 MiB
JOINED: Final = ("arrived", "joined")

Tell = Callable[[FromAgent], Awaitable[None]]


class Gathering:
    """The messages of one attempt's ranks. `tell` sends a message; `flush_late` calls `flush` after GATHER_S."""

    def __init__(self, attempt: int, tell: Tell, flush_late: Callable[[], None]) -> None:
        self.attempt = attempt
        self._tell = tell
        self._flush_late = flush_late
        self._said: list[tuple[int, RankReport]] = []
        self._exits: list[Exited] = []
        self._count = Counter[str]()

    async def report(self, rank: int, report: RankReport, ranks: int) -> None:
        """Send a rank's report. `ranks`: the number of ranks on this node."""
        kind = report["report"]
        if kind not in JOINED:
            await self.flush()
            await self._tell(Report(self.attempt, (rank,), report))
            return
        if self._exits or (self._said and self._said[0][1] != report):
            await self.flush()
        self._said.append((rank, report))
        self._count[kind] += 1
        if self._count[kind] == ranks:
            await self.flush()
        elif len(self._said) == 1:
            self._flush_late()

    async def exited(self, message: Exited) -> None:
        """Send the end of a rank: at once, unless the rank was ordered to stop."""
        if self._said or message.sent is None:
            await self.flush()
        if message.sent is None:
            await self._tell(message)
            return
        self._exits.append(message)
        if len(self._exits) == MOST_EXITS:
            await self.flush()
        elif len(self._exits) == 1:
            self._flush_late()

    async def flush(self) -> None:
        """Send the messages that wait."""
        said, self._said = self._said, []
        exits, self._exits = self._exits, []
        if said:
            await self._tell(Report(self.attempt, tuple(rank for rank, _ in said), said[0][1]))
        if exits:
            await self._tell(exits[0] if len(exits) == 1 else Exits(self.attempt, tuple(exits)))
