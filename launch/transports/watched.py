"""The processes that a transport has started, each with who watches it; a node's can be ended for a new one."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from muster.jobs.basics.errors import MusterError, UnreachableError
from muster.launch.transports.base import Gate
from muster.launch.transports.child import Child
from muster.launch.wire.channel import Channel


class Ear:
    """A gate until it is closed: then what comes late is dropped."""

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate | None = gate

    def connected(self, channel: Channel) -> None:
        """Hand an agent's channel over."""
        if self._gate is None:
            channel.close()
        else:
            self._gate.connected(channel)

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Tell of an agent that cannot be started, or has ended."""
        if self._gate is not None:
            self._gate.failed(node_rank, error)

    def close(self) -> None:
        """Hear no more."""
        self._gate = None


@dataclass(frozen=True)
class Entry:
    """A process of a node, or of all nodes where that is -1."""

    node: int
    child: Child
    ear: Ear
    watch: asyncio.Task[None]


async def watch_own(node: int, agent: Child, gate: Gate) -> None:
    """Tell of the end of an agent of this machine; what it wrote to standard error has been seen."""
    code = await asyncio.shield(agent.ended)
    gate.failed(node, UnreachableError(f"node {node}: its agent ended with code {code} before it had said a word"))


class Watched:
    """Child processes by node."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def add(self, node: int, child: Child, gate: Gate, watch: Callable[[Gate], Coroutine[Any, Any, None]]) -> None:
        """Keep a process, and have it watched; what the watch tells goes to the gate."""
        ear = Ear(gate)
        self._entries.append(Entry(node, child, ear, asyncio.create_task(watch(ear))))

    async def end(self, node: int) -> None:
        """End a node's processes at once; nobody hears of it."""
        ours = [entry for entry in self._entries if entry.node == node]
        self._entries = [entry for entry in self._entries if entry.node != node]
        for entry in ours:
            entry.ear.close()
        await asyncio.gather(*(entry.child.end(0.0) for entry in ours), *(entry.watch for entry in ours))

    async def close(self, wait_s: Callable[[int], float]) -> None:
        """Wait so long for the end of each, by its node, then end it; after that nobody watches any more."""
        await asyncio.gather(*(entry.child.end(wait_s(entry.node)) for entry in self._entries))
        for entry in self._entries:
            entry.watch.cancel()
        for ended in await asyncio.gather(*(entry.watch for entry in self._entries), return_exceptions=True):
            if isinstance(ended, Exception):  # a mistake of ours: one that is cancelled ends with no such thing
                raise ended
