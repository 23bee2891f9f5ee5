"""The agents of a run, from the first hello to the last bye; attempts come and go, they stay.

A node's slot is its place in here. It has an agent until that one is lost; then it may be given another.

An agent that is silent for SILENT_S is lost. Three things are starvation, and not silence:

    the supervisor's own tick came late    that time does not count
    the agent's own looks came late        it is allowed as much more, up to SILENT_S, and that before it has told
    all nodes fall silent at once          time does not count for TOGETHER_S: what they share has failed, or is loaded
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
TOGETHER_S: Final = 5.0  # then agents elsewhere have ended their ranks themselves (LEASE_S)
BEAT_S: Final = 1.0


@dataclass
class ClockOffset:
    """How far a node's clock is ahead of ours, from the exchange that travelled fastest (NTP, RFC 5905, section 8)."""

    seconds: float = 0.0
    travel_s: float = math.inf

    def note(self, *, sent: float, heard: float, answered: float, received: float) -> None:
        """Take an exchange into account: `sent` and `received` by our clock, `heard` and `answered` by the node's."""
        travel_s = (received - sent) - (answered - heard)
        if travel_s < self.travel_s:
            self.seconds, self.travel_s = ((heard - sent) + (answered - received)) / 2, travel_s


@dataclass
class Node:
    """What is known of one node."""

    place: NodePlacement  # its host, and how many ranks it has room for
    channel: Channel | None = None
    hello: Hello | None = None
    reached: Reached | None = None
    heard: float = 0.0  # monotonic seconds
    clock: ClockOffset = field(default_factory=ClockOffset)
    failure: MusterError | None = None  # why its agent could not be started
    gone: bool = False
    lost_at: float = 0.0  # monotonic seconds, of `gone`
    silent: bool = False  # it is gone for it was not heard: its ranks may live until its lease ends
    late_s: float = SILENT_S  # how late its agent has been of late
    progress: Progress | None = None  # the newest that its agent told of its ranks
    progress_at: float = 0.0
    losses: int = 0  # how often it was lost, or cut off from others
    tries: int = 0  # in vain, since then, to use it again
    tried: float = 0.0  # monotonic seconds: the newest loss or try
    given_up: bool = False  # it is not tried again

    @property
    def host(self) -> str:
        """Its host, by the name that its agent gives it."""
        return self.hello.host if self.hello is not None else self.place.host

    @property
    def is_alive(self) -> bool:
        """True when its agent can be spoken to."""
        return self.channel is not None and not self.gone

    @property
    def settled(self) -> bool:
        """True when its agent has come, or cannot."""
        return self.hello is not None or self.failure is not None

    def beat(self, message: Heartbeat, received: float, attempt: int) -> None:
        """Take the answer to a beat; what it says of another attempt's ranks does not count."""
        self.clock.note(sent=message.sent, heard=message.heard, answered=message.time, received=received)
        self.late_s = min(SILENT_S, message.late_s)
        if message.progress is not None and message.attempt == attempt:
            self.progress, self.progress_at = message.progress, time.monotonic()

    def set_back(self, now: float) -> None:
        """Count a loss; the more there were, the longer the node is left alone."""
        self.losses, self.tries, self.tried = self.losses + 1, 0, now

    def forget_agent(self) -> None:
        """Be ready for another agent."""
        self.channel = self.hello = self.reached = self.failure = None
        self.gone = self.silent = False
        self.progress, self.late_s = None, SILENT_S


class Crew:
    """All nodes, by slot."""

    def __init__(self, places: Sequence[NodePlacement]) -> None:
        self.nodes = [Node(place) for place in places]
        self.missing = set(range(len(self.nodes)))  # have not answered yet, nor failed: until then nobody is spoken to
        self.beaten = 0.0
        self.own = OwnLateness(TICK_S)
        self.together_s = 0.0  # for how long all nodes have been silent
        self.broken: list[int] = []  # slots that turned out to have gone when they were spoken to
        self.cuts: set[frozenset[int]] = set()  # pairs of slots between which there was no way when last tried

    def hosts(self, slots: Sequence[int]) -> list[str]:
        """Name the hosts of some slots."""
        return [self.nodes[slot].place.host for slot in slots]

    def alive(self) -> list[int]:
        """List the slots whose agent can be spoken to."""
        return [slot for slot, node in enumerate(self.nodes) if node.is_alive]

    def send(self, slot: int, message: ToAgent) -> None:
        """Send without waiting: a node that takes nothing more must not keep the others from hearing us."""
        channel = self.nodes[slot].channel
        if channel is None:
            return
        try:
            channel.post(message)
        except ChannelClosed:
            self.broken.append(slot)

    def answered(self, slot: int) -> None:
        """Note that an agent has come, or never will."""
        if slot in self.missing:
            self.missing.discard(slot)
            if not self.missing:  # until now nobody was spoken to
                for node in self.nodes:
                    node.heard = time.monotonic()

    def greeted(self, slot: int, hello: Hello, channel: Channel) -> bool:
        """Take a node's agent; False for a second one, or one of a node that we have given up.

        Raises:
            ProtocolError: if this very agent has greeted before.
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
        """Note a sign of life; False when it is one of an earlier agent of that node."""
        node = self.nodes[slot]
        if via is not node.channel:
            return False
        node.heard = time.monotonic()
        return True

    def tick(self, now: float) -> float:
        """Give every agent a sign of life, and ask for one, each second.

        Returns the seconds for which we ourselves were not there (Ctrl-Z, a sleeping laptop, a loaded machine).
        """
        late_s = self.own.look(now)
        silences = [now - late_s - self.nodes[slot].heard for slot in self.alive()]
        if len(silences) > 1 and min(silences) > SILENT_S / 2:
            self.together_s += TICK_S
        else:
            self.together_s = 0.0
        uncounted_s = late_s + TICK_S * (0.0 < self.together_s <= TOGETHER_S)
        for node in self.nodes:
            node.heard = min(now, node.heard + uncounted_s)
        if not self.missing and now - self.beaten >= BEAT_S:
            self.beaten = now
            for slot in self.alive():
                self.send(slot, Beat(time.time()))
        return late_s

    def silent(self, now: float) -> list[int]:
        """Mark and list the slots that have not been heard for too long."""
        if self.missing:
            return []
        found = [slot for slot in self.alive() if now - self.nodes[slot].heard > SILENT_S + self.nodes[slot].late_s]
        for slot in found:
            self.lose(slot, now, silent=True)
        return found

    def lose(self, slot: int, now: float, *, silent: bool = False) -> None:
        """Take an agent for gone."""
        node = self.nodes[slot]
        node.gone, node.lost_at, node.silent = True, now, silent
        node.set_back(now)
        if node.channel is not None:
            node.channel.abort()  # should it live, it learns now that it is alone

    def note_ways(self, joined: Sequence[int], cut_off: Sequence[int]) -> None:
        """Note which nodes reached the master, itself among `joined`, and which did not."""
        if self.cuts:
            self.cuts -= {frozenset(pair) for pair in combinations(joined, 2)}
        for slot in cut_off:
            new = {frozenset((slot, each)) for each in joined} - self.cuts
            if new:
                self.cuts |= new
                self.nodes[slot].set_back(time.monotonic())
