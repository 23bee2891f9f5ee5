"""The interface of a transport: a way to start agents on nodes, and the carrier of their control channels."""

from collections.abc import Collection
from typing import Final, Protocol

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError
from muster.launch.wire.channel import Channel

# how long remote agents wait for any message of the supervisor; then their rank parents stop the ranks within 1 s
LEASE_S: Final = 8.0


def agent_argv(python: str, code: str | None, *words: str) -> list[str]:
    """Return an agent's command line on another machine. `code`: the code's folder there; `words`: more arguments."""
    return [*module_argv(python, "muster.launch.agent", code), "--lease-s", str(LEASE_S), *words]


class Gate(Protocol):
    """A receiver for the channels of the agents that a transport starts, and for failures to start them."""

    def connected(self, channel: Channel) -> None:
        """Accept an agent's channel; `channel.node` is its node."""
        ...

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Record that a node's agent could not be started, or has ended. Only the first report on a node counts."""
        ...


class Transport(Protocol):
    """A way to start agents on nodes, with a carrier for their channels."""

    name: str
    patience_s: float  # how long agents may take to connect, if that is longer than the job's start time-out

    def commands(self) -> list[list[str]]:
        """Return the command lines that `start` runs: one per node of the run (with spares), or one for all."""
        ...

    def printed(self, slot: int) -> str:
        """Return the end of what a node has printed while its agent was started, for a message; "" for nothing."""
        ...

    async def start(self, gate: Gate) -> None:
        """Start one agent per node of the run. Each connection or failure is reported to the gate, possibly later.

        Raises:
            MusterError: if no agent can be started at all.
        """
        ...

    async def restart(self, slot: int, gate: Gate) -> None:
        """End the remaining processes of a node's lost agent, and start a new agent.

        The new agent is reported to the gate like those of `start`. Nothing more is reported about the lost agent.

        Raises:
            RefusedError: if this transport cannot restart agents; the message names an alternative.
        """
        ...

    async def close(self, lost: Collection[int]) -> None:
        """Wait until every agent started here has ended. End late agents, and agents of `lost` nodes at once."""
        ...
