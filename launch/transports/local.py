"""The local transport: every node is a pretend node on this machine.

One warm process serves all of them. It is started before anything else, so that its import of torch overlaps with the
rest of the start. Each node gets one agent, with a socket to its own rank parent in the warm process.
"""

import asyncio
import os
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from muster.jobs.basics.boot import module_argv
from muster.launch.node.rank_parent_link import start_warm
from muster.launch.transports.base import Gate
from muster.launch.transports.child import FAREWELL_S, Child
from muster.launch.transports.watched import NodeProcesses, watch_own


class Local:
    """Agents and their warm process on this machine."""

    name = "local"
    patience_s = 0.0

    def __init__(self, nodes: int, *, python: str) -> None:
        self.nodes = nodes
        self.python = python
        self._agents = NodeProcesses()
        self._rank_parents: list[socket.socket] = []
        self._warm: subprocess.Popen[bytes] | None = None

    def warm_up(self, preload: str, environment: Mapping[str, str], of_job: Sequence[str] = ()) -> None:
        """Start the warm process, in Muster's Python or the job's. Call this as soon as `environment` is known."""
        pairs = [socket.socketpair() for _ in range(self.nodes)]
        ours, theirs = [mine for mine, _ in pairs], [rank_parents for _, rank_parents in pairs]
        environ = {**os.environ, **environment}
        try:
            self._warm = start_warm(theirs, python=self.python, of_job=of_job, preload=preload, env=environ)
            self._rank_parents = ours
        except OSError:  # each agent will try again and report why the Python cannot be run
            for mine in ours:
                mine.close()
        for each in theirs:
            each.close()

    def commands(self) -> list[list[str]]:
        """Return every agent's command line."""
        return [[*module_argv(self.python, "muster.launch.agent"), "--node", str(node)] for node in range(self.nodes)]

    def printed(self, slot: int) -> str:
        """Return "", because the agents share this process's standard error."""
        return ""

    async def start(self, gate: Gate) -> None:
        """Start one agent per node, each with the socket of its rank parent."""
        for node in range(self.nodes):
            await self._start_one(node, gate, [self._rank_parents[node].fileno()] if self._rank_parents else [])
        for rank_parent in self._rank_parents:
            rank_parent.close()

    async def restart(self, slot: int, gate: Gate) -> None:
        """Start a node's agent again with a warm process of its own, because the lost agent's rank parent has ended."""
        await self._agents.end(slot)
        await self._start_one(slot, gate, [])

    async def _start_one(self, node: int, gate: Gate, rank_parent: Sequence[int]) -> None:
        argv = self.commands()[node]
        argv += ["--rank-parent-fd", str(rank_parent[0])] if rank_parent else []
        agent = Child(argv, piped=True, pass_fds=rank_parent, own_stderr=False)
        self._agents.add(node, agent, gate, partial(watch_own, node, agent))
        gate.connected(await agent.channel(node))

    async def close(self, lost: Collection[int]) -> None:
        """Wait until every agent has ended. Kill agents that take too long, and agents of lost nodes at once."""
        for rank_parent in self._rank_parents:
            rank_parent.close()
        await self._agents.close(lambda node: 0.0 if node in lost else FAREWELL_S)
        if self._warm is not None:
            try:
                await asyncio.to_thread(self._warm.wait, FAREWELL_S)  # the process ends with its last rank parent
            except subprocess.TimeoutExpired:
                self._warm.kill()
                self._warm.wait()
