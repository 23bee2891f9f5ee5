"""Detect a hang in one attempt, ask every rank for its stacks, and blame the rank that is not where the others wait.

    progress.py detects the hang ──→ every node sends stacks, for STACKS_S ──→ stacks.py finds the rank to blame

Programs without a session are judged by their output alone, and are not asked for stacks.
"""

import time
from dataclasses import dataclass
from typing import Final

from muster.jobs.basics import exits
from muster.launch.records.verdict import RankEnd, Stop
from muster.launch.supervision import progress, stacks
from muster.launch.supervision.roster import Roster
from muster.launch.wire.messages import Stacks
from muster.launch.wire.records import RankStacks

STACKS_S: Final = 4.0  # time limit for the stacks of hung ranks to arrive
LAST_LINES: Final = 20


@dataclass(frozen=True)
class Mute:
    """A node that sent no stacks."""

    node: int
    why: str
    seconds: float


class HangWatch:
    """The detector of a hang in one attempt. `hang_s`, `start_timeout_s`: the job's limits."""

    def __init__(self, roster: Roster, hang_s: float | None, start_timeout_s: float) -> None:
        self.roster = roster
        self.hang_s = hang_s
        self.start_timeout_s = start_timeout_s
        self.hang: progress.Hang | None = None
        self._deadline = 0.0
        self._stacks: dict[int, RankStacks] = {}

    def sees_session(self) -> bool:
        """Return whether a rank has opened a session, and so reports its progress."""
        return any(node.progress is not None and node.progress["sessions"] for node in self.roster.nodes)

    def look(self, now: float, began: float) -> progress.Hang | None:
        """Return the hang if there is one now, else None. `began`: when the ranks were started (monotonic seconds)."""
        records = [(node.progress, node.progress_at) for node in self.roster.nodes]
        self.hang, self._deadline = progress.hang(records, now, self.hang_s), now + STACKS_S
        if self.hang is None and self.hang_s is not None:
            self.hang = progress.silence(records, now, self.hang_s, began, self.start_timeout_s)
        return self.hang

    def take(self, message: Stacks) -> None:
        """Keep the stacks of a node's ranks."""
        self._stacks.update({stack["rank"]: stack for stack in message.ranks})

    def is_due(self, now: float) -> bool:
        """Return whether there is a hang, and all stacks have arrived or their deadline has passed."""
        complete = len(self._stacks) >= len(self.roster.running)
        return self.hang is not None and (complete or now > self._deadline)

    def blame(self) -> RankEnd | Mute | Stop:
        """Blame a rank that is not where the others wait, or else a node that sent no stacks, or else nobody."""
        assert self.hang is not None
        found, seconds, steps = stacks.absent(self._stacks), self.hang.seconds, self.hang.steps
        text = f"{self.hang.text}: {found.text}"
        if found.ranks:
            rank = found.ranks[0]
            node, lines = self.roster.node_of[rank], list(self._stacks[rank]["lines"][-LAST_LINES:])
            host, since = self.roster.hosts[node], time.time() - seconds
            return RankEnd(rank, node, host, exits.TIMEOUT, None, since, "own", text, lines, step=steps, hung=True)
        if mute := {self.roster.node_of[each] for each in self.roster.running - self._stacks.keys()}:
            why = f"{self.hang.text}, and its rank parent does not answer, so the position of its ranks is unknown"
            return Mute(min(mute), why, seconds)
        return Stop(exits.TIMEOUT, f"the ranks {text}")
