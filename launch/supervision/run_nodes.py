"""The agents of a run, from the first hello to the last bye. They outlive attempts.

A node's slot is its index here. When its agent is lost, another agent can be started for it.

An agent that is silent for SILENT_S is lost. Three delays do not count as silence:

    the supervisor's own tick came late    that time does not count
    the agent's own checks came late       it gets that much more time, at most SILENT_S (SILENT_S before it reports)
    all nodes fall silent at once          TOGETHER_S do not count: something that they share failed or is overloaded
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Final

from muster.jobs.basics.errors import MusterError
from muster.jobs.hosts.placement import NodePlacement
from muster.launch.common.lateness import OwnLateness
from muster.launch.wire.channel import Channel, ChannelClosed
from muster.launch.wire.codec import ProtocolError
from muster.launch.wire.messages import Beat, Heartbeat, Hello, Reached, ToAgent
from muster.launch.wire.records import Progress

TICK_S: Final = 0.25
SILENT_S: Final = 5.0
TOGETHER_S: Final = 5.0  # after this time, remote agents have ended their ranks by themselves (LEASE_S)
CLOCK_NOISE_S: Final = 0.01  # the error of a clock during an exchange, for instance while NTP adjusts its rate
BEAT_S: Final = 1.0
BEATS_PER_S: Final = 5000  # of all nodes together; more nodes get beats at longer intervals
RANKS_PER_S: Final = 4096  # of all nodes together, whose own progress is asked for


@dataclass
class ClockOffset:
    """A node's clock minus ours, from the exchange with the shortest travel time (NTP, RFC 5905, section 8).

    An exchange gives the offset to within half of its travel time. If that contradicts the exchange used so far, a
    clock was set (or drifted) between them, and the newer exchange is used.
    """

    seconds: float = 0.0
    travel_s: float = math.inf

    def note(self, *, sent: float, heard: float, answered: float, received: float) -> None:
        """Update from one exchange: `sent` and `received` by our clock, `heard` and `answered` by the node's."""
        travel_s = (received - sent) - (answered - heard)
        if travel_s < -CLOCK_NOISE_S:  # a clock was set during the exchange
            return
        seconds = ((heard - sent) + (answered - received)) / 2
        contradicts = abs(seconds - self.seconds) > (travel_s + self.travel_s) / 2 + CLOCK_NOISE_S
        if travel_s < self.travel_s or contradicts:
            self.seconds, self.travel_s = seconds, travel_s


@dataclass
class NodeState:
    """The state of one node, as the supervisor knows it."""

    place: NodePlacement  # the host, and the number of its ranks
    channel: Channel | None = None
    hello: Hello | None = None
    reached: Reached | None = None
    heard: float = 0.0  # monotonic seconds
    clock: ClockOffset = field(default_factory=ClockOffset)
    failure: MusterError | None = None  # why its agent did not start
    gone: bool = False
    lost_at: float = 0.0  # when `gone` was set, in monotonic seconds
    silent: bool = False  # `gone` because of silence: its ranks may live until its lease expires
    late_s: float = SILENT_S  # how late its agent's periodic checks have recently been
    progress: Progress | None = None  # the newest progress record from its agent
    progress_at: float = 0.0
    ranks_at: float = 0.0  # when `progress` last had the progress of every rank
    losses: int = 0  # how often it was lost or cut off from other nodes
    tries: int = 0  # failed tries to use it since its last loss
    tried: float = 0.0  # when it was last lost or tried, in monotonic seconds
    given_up: bool = False  # the supervisor does not try this node again
    printed: Callable[[], str] = str  # the end of what it has printed while its agent was started

    @property
    def host(self) -> str:
        """The host's name, as its agent reports it."""
        return self.hello.host if self.hello is not None else self.place.host

    @property
    def is_alive(self) -> bool:
        """True when messages can be sent to its agent."""
        return self.channel is not None and not self.gone

    @property
    def settled(self) -> bool:
        """True when its agent has greeted, or could not be started."""
        return self.hello is not None or self.failure is not None

    def beat(self, message: Heartbeat, received: float, attempt: int) -> None:
        """Record the answer to a beat. Ignore the progress in it if it is about another attempt."""
        self.clock.note(sent=message.sent, heard=message.heard, answered=message.time, received=received)
        self.late_s = min(SILENT_S, message.late_s)
        if message.progress is not None and message.attempt == attempt:
            now, told, before = time.monotonic(), message.progress, self.progress
            if told["phases"] and not told["ranks"] and before is not None:  # this beat did not ask for the ranks
                told["ranks"] = before["ranks"]
            else:
                self.ranks_at = now
            self.progress, self.progress_at = told, now

    def count_loss(self, now: float) -> None:
        """Count a loss. Each loss lengthens the wait before the node is tried again."""
        self.losses, self.tries, self.tried = self.losses + 1, 0, now

    def forget_agent(self) -> None:
        """Reset the node's state, ready for a new agent."""
        self.channel = self.hello = self.reached = self.failure = None
        self.gone = self.silent = False
        self.clock = ClockOffset()
        self.progress, self.late_s = None, SILENT_S


class RunNodes:
    """All nodes of a run, by slot."""

    def __init__(self, places: Sequence[NodePlacement], printed: Callable[[int], str] = lambda slot: "") -> None:
        self.nodes = [NodeState(place, printed=partial(printed, slot)) for slot, place in enumerate(places)]
        # slots that have neither answered nor failed; no messages are sent until this set is empty
        self.missing = set(range(len(self.nodes)))
        self._beaten = 0.0  # when beats were last sent
        self._due = 0.0  # nodes to which beats are due
        self._next = 0  # the slot that gets the next beat
        self._ranks = sum(node.ranks for node in places)
        self.beat_s = max(BEAT_S, len(self.nodes) / BEATS_PER_S)
        self._turn = 0  # the first slot whose ranks the beats of this round ask for
        self.own = OwnLateness(TICK_S)
        self.together_s = 0.0  # how long all nodes have been silent at the same time
        self.broken: list[int] = []  # slots whose channel turned out to be closed when sending
        self.cuts: set[frozenset[int]] = set()  # pairs of slots that could not reach each other when last tried

    def hosts(self, slots: Sequence[int]) -> list[str]:
        """Return the hosts of some slots."""
        return [self.nodes[slot].place.host for slot in slots]

    def alive(self) -> list[int]:
        """List the slots whose agents can be sent messages."""
        return [slot for slot, node in enumerate(self.nodes) if node.is_alive]

    def send(self, slot: int, message: ToAgent) -> None:
        """Send without waiting, so that a node that does not read cannot block messages to the others."""
        channel = self.nodes[slot].channel
        if channel is None:
            return
        try:
            channel.post(message)
        except ChannelClosed:
            self.broken.append(slot)

    def answered(self, slot: int) -> None:
        """Record that an agent has greeted, or will never greet."""
        if slot in self.missing:
            self.missing.discard(slot)
            if not self.missing:  # no answer is missing, so messages may be sent from now on
                self._beaten = time.monotonic()
                for node in self.nodes:
                    node.heard = self._beaten

    def greeted(self, slot: int, hello: Hello, channel: Channel) -> bool:
        """Accept a node's agent; return False for a second agent, or for an agent of a node that was given up.

        Raises:
            ProtocolError: if this same agent has greeted before.
        """
        node = self.nodes[slot]
        if channel is node.channel:
            raise ProtocolError("it has greeted already")
        if node.settled:
            channel.close()
            return False
        node.hello, node.channel, node.heard = hello, channel, time.monotonic()
        return True

    def heard(self, slot: int, via: Channel) -> bool:
        """Record a sign of life; return False if it comes from an earlier agent of the node."""
        node = self.nodes[slot]
        if via is not node.channel:
            return False
        node.heard = time.monotonic()
        return True

    def tick(self, now: float) -> float:
        """Send the beats that are due. Exclude the delays listed above from the agents' silence.

        Returns the seconds for which the supervisor itself did not run (Ctrl-Z, a sleeping laptop, a loaded machine).
        """
        late_s = self.own.look(now)
        heard = [node.heard for node in self.nodes if node.is_alive]
        if len(heard) > 1 and now - late_s - max(heard) > SILENT_S / 2:
            self.together_s += TICK_S
        else:
            self.together_s = 0.0
        uncounted_s = late_s + TICK_S * (0.0 < self.together_s <= TOGETHER_S)
        if uncounted_s:
            for node in self.nodes:
                node.heard = min(now, node.heard + uncounted_s)
        if not self.missing:
            self._beat(now)
        return late_s

    def _beat(self, now: float) -> None:
        """Send the next agents a beat, so that each gets one every `beat_s` seconds, and messages never come in bursts.

        In large runs, the beats of a round ask only some of the nodes for the progress of each rank.
        """
        count, sent = len(self.nodes), time.time()
        self._due = min(count, self._due + count * (now - self._beaten) / self.beat_s)
        self._beaten = now
        most = max(1, int(count * RANKS_PER_S * self.beat_s / max(1, self._ranks)))
        beats = {each: Beat(sent, each) for each in (True, False)}
        while self._due >= 1:
            slot = self._next
            if self.nodes[slot].is_alive:
                self.send(slot, beats[(slot - self._turn) % count < most])
            self._due, self._next = self._due - 1, (slot + 1) % count
            if not self._next:
                self._turn = (self._turn + most) % count

    def silent(self, now: float) -> list[int]:
        """Mark nodes that have been silent for too long as lost; return their slots."""
        if self.missing:
            return []
        overdue = [slot for slot, node in enumerate(self.nodes) if now - node.heard > SILENT_S + node.late_s]
        found = [slot for slot in overdue if self.nodes[slot].is_alive]
        for slot in found:
            self.lose(slot, now, silent=True)
        return found

    def lose(self, slot: int, now: float, *, silent: bool = False) -> None:
        """Mark a node's agent as lost."""
        node = self.nodes[slot]
        node.gone, node.lost_at, node.silent = True, now, silent
        node.count_loss(now)
        if node.channel is not None:
            node.channel.abort()  # an agent that is still alive then knows that it was given up

    def note_ways(self, joined: Sequence[int], cut_off: Sequence[int]) -> None:
        """Record which slots reached the master (`joined`, with the master's own), and which did not (`cut_off`)."""
        if self.cuts:
            self.cuts -= {frozenset(pair) for pair in combinations(joined, 2)}
        for slot in cut_off:
            new = {frozenset((slot, each)) for each in joined} - self.cuts
            if new:
                self.cuts |= new
                self.nodes[slot].count_loss(time.monotonic())
