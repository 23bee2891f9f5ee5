"""A transport's processes, each with a task that watches it. A node's process can be replaced by a new one."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from muster.jobs.basics.errors import MusterError, UnreachableError
from muster.launch.transports.base import Gate
from muster.launch.transports.child import Child
from muster.launch.wire.channel import Channel


class ClosableGate:
    """A gate that passes reports on to another gate until it is closed. It drops later reports."""

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate | None = gate

    def connected(self, channel: Channel) -> None:
        """Pass on an agent's channel, or close the channel if this gate is closed."""
        if self._gate is None:
            channel.close()
        else:
            self._gate.connected(channel)

    def failed(self, node_rank: int, error: MusterError) -> None:
        """Pass on the report that an agent cannot be started, or has ended."""
        if self._gate is not None:
            self._gate.failed(node_rank, error)

    def close(self) -> None:
        """Drop all later reports."""
        self._gate = None


@dataclass(frozen=True)
class NodeProcess:
    """A process of a node; `node` is -1 for a process of all nodes."""

    node: int
    child: Child
    gate: ClosableGate
    watch: asyncio.Task[None]


async def watch_own(node: int, agent: Child, gate: Gate) -> None:
    """Report the end of an agent on this machine, which shares this process's standard error."""
    code = await asyncio.shield(agent.ended)
    gate.failed(node, UnreachableError(f"node {node}: its agent ended with code {code} before its greeting"))


class NodeProcesses:
    """A transport's child processes, by node."""

    def __init__(self) -> None:
        self._entries: list[NodeProcess] = []

    def add(self, node: int, child: Child, gate: Gate, watch: Callable[[Gate], Coroutine[Any, Any, None]]) -> None:
        """Add a process, and start the task that watches it; the task's reports go to `gate`."""
        closable = ClosableGate(gate)
        self._entries.append(NodeProcess(node, child, closable, asyncio.create_task(watch(closable))))

    async def end(self, node: int) -> None:
        """End a node's processes at once, without any report to the gate."""
        ours = [entry for entry in self._entries if entry.node == node]
        self._entries = [entry for entry in self._entries if entry.node != node]
        for entry in ours:
            entry.gate.close()
        await asyncio.gather(*(entry.child.end(0.0) for entry in ours), *(entry.watch for entry in ours))

    async def close(self, wait_s: Callable[[int], float]) -> None:
        """Wait up to `wait_s(node)` seconds for each process to end, then end it; cancel the watching tasks."""
        await asyncio.gather(*(entry.child.end(wait_s(entry.node)) for entry in self._entries))
        for entry in self._entries:
            entry.watch.cancel()
        for ended in await asyncio.gather(*(entry.watch for entry in self._entries), return_exceptions=True):
            if isinstance(ended, Exception):  # a bug, not a cancelled task: CancelledError is no Exception
                raise ended
