"""The supervisor's port for agents that dial back. Connections of other processes cannot harm the run (`door.py`).

The agent and the supervisor prove to each other that they hold the key of the agent's node (handshake.py). Then the
connection becomes the channel of the node, which is no longer expected. Before, the supervisor reads lines of at most
1 KiB, and no JSON. The port stays bound to the end of the run, so that no other process can take it.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.handshake import (
    REFUSED,
    WELCOME,
    HandshakeError,
    SupervisorSide,
    new_secret,
    node_key,
    read_greeting,
)
from muster.jobs.machine import ports
from muster.launch.wire.channel import Channel, over_socket
from muster.launch.wire.door import BACKLOG, Door, read_line


class Listener:
    """The port for the agents of `nodes` nodes. `secret`: the run's secret, if agents already have their keys."""

    def __init__(
        self, nodes: int, *, run: str, attempt: int = 0, secret: str = "", report: Callable[[str], None]
    ) -> None:
        self.secret = secret or new_secret()
        self.port = 0
        self.expected = set(range(nodes))
        self.addresses: list[str] = []  # the addresses that agents may have dialled
        self._run = run
        self._attempt = attempt
        self._door = Door(self._admit, more=nodes, report=report, expects=lambda: bool(self.expected))
        self._accepted: asyncio.Queue[Channel] = asyncio.Queue()

    async def open(self, address: str, port: int = 0, *, dialled_as: Iterable[str] = ()) -> None:
        """Listen at `address` ("": every address of this host), on the given port or on a free one.

        `dialled_as`: the addresses that agents may have dialled (default: `address`).

        Raises:
            RefusedError: if the given port is in use or may not be bound.
        """
        if port:
            try:
                listening = socket.create_server((address, port), backlog=BACKLOG)
            except OSError as error:
                reason = error.strerror or error
                raise RefusedError(f"port {port}: cannot be bound here: {reason}; choose another --port") from error
        else:
            listening = ports.bind(address, backlog=BACKLOG)
        self._door.open(listening)
        self.port = self._door.port
        self.addresses = [f"{each}:{self.port}" for each in dialled_as or [address]]

    async def accept(self) -> Channel:
        """Return the channel of the next node that passes the handshake. There is no time limit."""
        return await self._accepted.get()

    def expect(self, node: int) -> None:
        """Accept one connection of an agent of this node."""
        self.expected.add(node)
        self._door.wake()

    def close(self) -> None:
        """Close the port and every channel that was not yet accepted. Accepted channels stay open."""
        self._door.close()
        while not self._accepted.empty():
            self._accepted.get_nowait().abort()

    async def _admit(self, connection: socket.socket) -> None:
        """Run the handshake on a connection, and turn it into a channel."""
        node, rest = await self._shake_hands(connection)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = await over_socket(connection, node=node, received=rest)
        except BaseException:
            self.expected.add(node)  # the agent may dial again
            raise
        self._accepted.put_nowait(channel)

    async def _shake_hands(self, connection: socket.socket) -> tuple[int, bytes]:
        """Return the node at the other end, and the bytes that followed its proof."""
        loop = asyncio.get_running_loop()
        line, rest = await read_line(connection, b"")
        greeting = read_greeting(line)
        node, _, dialled = greeting
        if dialled not in self.addresses:
            raise HandshakeError("dialled another address")
        self._door.has_greeted(connection)
        end = SupervisorSide(node_key(self.secret, node), greeting, self._run, self._attempt)
        await loop.sock_sendall(connection, end.challenge())
        line, rest = await read_line(connection, rest)
        if not end.is_proved(line):
            raise HandshakeError("wrong key")
        if node not in self.expected:
            why = f"node {node} is not expected now: it is connected already, or not part of this run"
            await loop.sock_sendall(connection, f"{REFUSED}{why}\n".encode())
            raise HandshakeError(f"node {node} is not expected")
        self.expected.remove(node)
        try:
            await loop.sock_sendall(connection, WELCOME)
        except BaseException:
            self.expected.add(node)  # the agent may dial again
            raise
        return node, rest
