"""The ssh transport: one ssh per node, whose pipes carry the agent's channel. It opens no port and installs nothing."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from muster.jobs.basics.errors import UnreachableError
from muster.jobs.hosts.hosts import HostSet
from muster.jobs.hosts.placement import Host
from muster.jobs.spec.site import SshSettings
from muster.launch.transports.base import Gate, agent_argv
from muster.launch.transports.child import FAREWELL_S, READING_S, Child
from muster.launch.transports.ssh_command import explain, ssh_argv
from muster.launch.transports.watched import NodeProcesses
from muster.launch.wire.channel import ChannelClosed, NotAMessage, quoted

FANOUT: Final = 64  # ssh connections being set up at once


class Ssh:
    """Agents on other machines, each started by its own ssh."""

    name = "ssh"
    patience_s = 0.0

    def __init__(
        self, nodes: Sequence[Host], hosts: HostSet, ssh: SshSettings, *, python: str, code: str | None, fanout: int
    ) -> None:
        self.nodes = nodes
        self.hosts = hosts
        self.ssh = ssh
        self.python = python
        self.code = code
        self._turns = asyncio.Semaphore(fanout or FANOUT)
        self._started = NodeProcesses()
        self._said: dict[int, Callable[[], bytes]] = {}

    def commands(self) -> list[list[str]]:
        """Return every ssh's command line."""
        agents = [agent_argv(self.python, self.code, "--node", str(node)) for node, _ in enumerate(self.nodes)]
        return [ssh_argv(host, self.hosts, self.ssh, argv) for host, argv in zip(self.nodes, agents, strict=True)]

    def printed(self, slot: int) -> str:
        """Return the last lines that a node's shell or ssh has printed."""
        return quoted(self._said[slot]()) if slot in self._said else ""

    async def start(self, gate: Gate) -> None:
        """Start all agents, up to `fanout` at once."""
        for node, argv in enumerate(self.commands()):
            await self._start_one(node, argv, gate)

    async def restart(self, slot: int, gate: Gate) -> None:
        """Start a node's agent with a new ssh. First end the old ssh, which may still wait for a dead host."""
        await self._started.end(slot)
        await self._start_one(slot, self.commands()[slot], gate)

    async def _start_one(self, node: int, argv: Sequence[str], gate: Gate) -> None:
        await self._turns.acquire()
        child = Child(argv, piped=True)
        self._started.add(node, child, gate, partial(self._watch, node, child))

    async def _watch(self, node: int, child: Child, gate: Gate) -> None:
        errors = asyncio.create_task(child.read_errors())
        channel = await child.channel(node)
        self._said[node] = lambda: b"\n".join((channel.printed, child.printed))
        try:
            await channel.wait_for_hello()
            gate.connected(channel)
        except NotAMessage as error:
            channel.close()
            why = f"{error}; make its shell's start-up files silent for ssh"
            gate.failed(node, UnreachableError(f"{self.nodes[node].name}: {why}"))
        except ChannelClosed:
            channel.close()
        finally:
            self._turns.release()
        code = await asyncio.shield(child.ended)
        await asyncio.wait([errors], timeout=READING_S)  # a child of ssh may hold standard error open
        gate.failed(node, explain(self.nodes[node], code, child.errors, self.ssh))

    async def close(self, lost: Collection[int]) -> None:
        """Wait until every agent and its ssh have ended, except for lost nodes, whose ssh has a long time-out."""
        await self._started.close(lambda node: 0.0 if node in lost else FAREWELL_S)
