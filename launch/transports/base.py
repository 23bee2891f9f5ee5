"""What a transport is: a way to start agents on nodes, and the carrier over which they talk."""

from collections.abc import Collection
from typing import Final, Protocol

from muster.jobs.basics.boot import module_argv
from muster.jobs.basics.errors import MusterError
from muster.launch.wire.channel import Channel

LEASE_S: Final = 8.0  # that agents on other machines wait for a sign of the supervisor; their keeper needs 1 s more


def agent_argv(python: str, code: str | None, *words: str) -> list[str]:
    """Return the argv of an agent on another machine, with the code there; `words` follow."""
    return [*module_argv(python, "muster.launch.agent", code), "--lease-s", str(LEASE_S), *words]


class Gate(Protocol):
    """Where a transport hands over what becomes of the agents that it starts."""

    def connected(self, channel: Channel) -> None:
        """Take an agent's channel; it knows which node is at the other end."""
        ...

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Learn that a node's agent cannot be started, or has ended; the first word on a node counts."""
        ...


class Transport(Protocol):
    """How agents are started on nodes, and over which carrier they talk."""

    name: str
    patience_s: float  # how long agents may take to come, where that is longer than the job's start time-out

    def commands(self) -> list[list[str]]:
        """Return the argv of what `start` starts: one per node of the crew, or one for all."""
        ...

    async def start(self, gate: Gate) -> None:
        """Start one agent per node of the crew. Each is handed over when it connects, or fails, be it later.

        Raises:
            MusterError: nothing can be started at all.
        """
        ...

    async def restart(self, slot: int, gate: Gate) -> None:
        """Start the agent of one node of the crew once more, after it was lost; what was left of its start is ended.

        The new agent is handed over like those of `start`, or fails; of the lost one nothing is said any more.

        Raises:
            RefusedError: this transport cannot; the message says what to do instead.
        """
        ...

    async def close(self, lost: Collection[int]) -> None:
        """Wait until every agent that was started from here has ended; end one that does not, and the lost at once."""
        ...
