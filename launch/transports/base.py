"""The interface of a transport: a way to start agents on nodes, and the carrier of their control channels."""

from collections.abc import Collection
from typing import Final, Protocol

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError
from muster.launch.wire.channel import Channel

# how long agents on other machines wait for a sign of the supervisor; their rank parents need 1 s more
LEASE_S: Final = 8.0


def agent_argv(python: str, code: str | None, *words: str) -> list[str]:
    """Return the command line of an agent on another machine, with the code there; `words` are appended."""
    return [*module_argv(python, "muster.launch.agent", code), "--lease-s", str(LEASE_S), *words]


class Gate(Protocol):
    """Receives the channels of the agents that a transport starts, and the failures to start them."""

    def connected(self, channel: Channel) -> None:
        """Accept an agent's channel, which knows the node at its other end."""
        ...

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Accept the failure of a node's agent to start, or its end; only the first report on a node counts."""
        ...


class Transport(Protocol):
    """A way to start agents on nodes, with a carrier for their channels."""

    name: str
    patience_s: float  # how long agents may take to connect, if that is longer than the job's start time-out

    def commands(self) -> list[list[str]]:
        """Return the command lines that `start` runs: one per node of the run (with spares), or one for all."""
        ...

    async def start(self, gate: Gate) -> None:
        """Start one agent per node of the run. Each connection or failure is reported to the gate, possibly later.

        Raises:
            MusterError: if no agent can be started at all.
        """
        ...

    async def restart(self, slot: int, gate: Gate) -> None:
        """Start the agent of one node again after it was lost; end what remains of the earlier start.

        The new agent is reported to the gate like those of `start`. Nothing more is reported about the lost one.

        Raises:
            RefusedError: if this transport cannot do it; the message names an alternative.
        """
        ...

    async def close(self, lost: Collection[int]) -> None:
        """Wait until every agent started from here has ended. End those that do not; end the `lost` ones at once."""
        ...
