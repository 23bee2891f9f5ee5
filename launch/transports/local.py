"""The local transport: every node is a pretend node on this machine.

One warm process for all, started before anything else, so that its import of torch overlaps everything; one agent
per node with a socket to its own keeper in there. Carrier: the agents' pipes, or TCP where a test asks for it.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from launch.channel import LINE_LIMIT, Channel, Listener, to_process
from launch.keeper_link import start_warm

FAREWELL_S: Final = 5.0


class Local:
    """Agents and their warm process on this machine."""

    name = "local"
    one_host = True

    def __init__(self, nodes: int, *, python: str, tcp: bool = False) -> None:
        self.nodes = nodes
        self.python = python
        self.agents: list[asyncio.subprocess.Process] = []
        self._listener = Listener() if tcp else None
        self._token_file = ""
        self._keepers: list[socket.socket] = []
        self._warm: subprocess.Popen[bytes] | None = None

    def warm_up(self, preload: str, environment: Mapping[str, str]) -> None:
        """Start the warm process; call it as early as its environment is known."""
        pairs = [socket.socketpair() for _ in range(self.nodes)]
        self._keepers = [ours for ours, _ in pairs]
        theirs = [keepers for _, keepers in pairs]
        self._warm = start_warm(theirs, python=self.python, preload=preload, env={**os.environ, **environment})
        for each in theirs:
            each.close()

    async def start(self) -> list[Channel]:
        """Start one agent per node; return their channels, unordered: an agent's hello says which node it is."""
        if self._listener is not None:
            await self._listener.open("127.0.0.1")
            descriptor, self._token_file = tempfile.mkstemp(prefix="muster-token-")  # made with mode 0600
            with os.fdopen(descriptor, "w") as file:
                file.write(self._listener.token)
        for node in range(self.nodes):
            self.agents.append(await self._start_agent(node))
        for keeper in self._keepers:
            keeper.close()
        if self._listener is not None:
            return [await self._listener.accept() for _ in range(self.nodes)]
        return [replace(await to_process(agent), node=node) for node, agent in enumerate(self.agents)]

    async def _start_agent(self, node: int) -> asyncio.subprocess.Process:
        argv = [self.python, "-I", "-m", "launch.agent", "--node", str(node)]
        descriptors = []
        if self._keepers:
            descriptors = [self._keepers[node].fileno()]
            argv += ["--keeper-fd", str(descriptors[0])]
        if self._listener is not None:
            argv += ["--connect", f"127.0.0.1:{self._listener.port}", "--token-file", self._token_file]
        piped = asyncio.subprocess.DEVNULL if self._listener is not None else asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=piped,
            stdout=piped,
            pass_fds=descriptors,
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
            limit=LINE_LIMIT,
        )

    async def close(self) -> None:
        """Wait until every agent has ended; kill one that does not."""
        if self._token_file:
            Path(self._token_file).unlink(missing_ok=True)
        if self._listener is not None:
            self._listener.close()
        for keeper in self._keepers:
            keeper.close()
        await asyncio.gather(*(_end(agent) for agent in self.agents))
        if self._warm is not None:
            try:
                await asyncio.to_thread(self._warm.wait, FAREWELL_S)  # it ends with its last keeper
            except subprocess.TimeoutExpired:
                self._warm.kill()
                self._warm.wait()


async def _end(agent: asyncio.subprocess.Process) -> None:
    """Wait for an agent's own end, then kill it."""
    try:
        await asyncio.wait_for(agent.wait(), FAREWELL_S)
    except asyncio.TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            agent.kill()
        await agent.wait()
