"""The supervisor's port for agents that dial back. Connections of other processes cannot harm the run.

    connection ──→ is a node expected? ──no──→ closed unread
                        │ yes
                   handshake.py, no JSON: at most UNPROVED at once, each _handshake_s and 1 KiB per line
                        │ proved
                   becomes the channel of its node, which is no longer expected

The port stays bound to the end of the run, so that no other process can take it. Refusals are counted and reported once
a second.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.handshake import (
    LONGEST,
    REFUSED,
    WELCOME,
    HandshakeError,
    SupervisorSide,
    new_secret,
    node_key,
    read_greeting,
)
from muster.jobs.basics.words import counted
from muster.jobs.machine import ports
from muster.launch.wire.channel import Channel, over_socket

BACKLOG: Final = 4096  # all agents of a large run dial at once
UNPROVED: Final = 256  # maximum handshakes at once, plus one per node; a further one drops the oldest without greeting
HANDSHAKE_S: Final = 10.0  # for one node; more for many
HANDSHAKES_PER_S: Final = 400  # that a slow machine completes when all agents dial at once
REPORT_S: Final = 1.0
PAUSE_S: Final = 0.05  # pause after an error of accept(2), such as running out of descriptors


class Listener:
    """The port for the agents of `nodes` nodes. `secret`: the run's secret, if agents already have their keys."""

    def __init__(
        self, nodes: int, *, run: str, attempt: int = 0, secret: str = "", report: Callable[[str], None]
    ) -> None:
        self.secret = secret or new_secret()
        self.port = 0
        self.expected = set(range(nodes))
        self.addresses: list[str] = []  # the addresses that agents may have dialled
        self._nodes = nodes
        self._handshake_s = HANDSHAKE_S + nodes / HANDSHAKES_PER_S
        self._run = run
        self._attempt = attempt
        self._report = report
        self._socket: socket.socket | None = None
        self._accepted: asyncio.Queue[Channel] = asyncio.Queue()
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}
        self._greeted: set[socket.socket] = set()  # connections that have sent an agent's first line
        self._refused: Counter[str] = Counter()
        self._last_peer = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, address: str, port: int = 0, *, dialled_as: Iterable[str] = ()) -> None:
        """Listen at `address` ("": every address of this host), on the given port or on a free one.

        `dialled_as`: the addresses that agents may have dialled (default: `address`).

        Raises:
            RefusedError: if the given port is in use or may not be bound.
        """
        if port:
            try:
                self._socket = socket.create_server((address, port), backlog=BACKLOG)
            except OSError as error:
                reason = error.strerror or error
                raise RefusedError(f"port {port}: cannot be bound here: {reason}; choose another --port") from error
        else:
            self._socket = ports.bind(address, backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self.addresses = [f"{each}:{self.port}" for each in dialled_as or [address]]
        for work in (self._accept(self._socket), self._report_refusals()):
            self._tasks.add(asyncio.create_task(work))

    async def accept(self) -> Channel:
        """Return the channel of the next node that passes the handshake. There is no time limit."""
        return await self._accepted.get()

    def expect(self, node: int) -> None:
        """Accept one connection of an agent of this node."""
        self.expected.add(node)

    def close(self) -> None:
        """Close the port and every channel that was not yet accepted. Accepted channels stay open."""
        for task in (*self._tasks, *self._handshakes.values()):
            task.cancel()
        while not self._accepted.empty():
            self._accepted.get_nowait().abort()
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listening)
            except OSError as error:  # the peer has already closed, or no descriptor is free
                self._refuse(error.strerror or str(error), "")
                await asyncio.sleep(PAUSE_S)
                continue
            if not self.expected:
                self._refuse("no node is expected", peer[0])
                connection.close()
                continue
            if len(self._handshakes) >= UNPROVED + self._nodes:
                oldest = next((each for each in self._handshakes if each not in self._greeted), None)
                self._handshakes.pop(oldest or next(iter(self._handshakes))).cancel()
                self._refuse("too many connections", peer[0])
            self._handshakes[connection] = asyncio.create_task(self._admit(connection, peer[0]))
            await asyncio.sleep(0)  # start the handshake before accepting again

    async def _admit(self, connection: socket.socket, peer: str) -> None:
        """Run the handshake on a connection; turn it into a channel, or close it if it fails."""
        channel: Channel | None = None
        try:
            node, rest = await asyncio.wait_for(self._shake_hands(connection), self._handshake_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = await over_socket(connection, node=node, received=rest)
            self._accepted.put_nowait(channel)
        except HandshakeError as error:
            self._refuse(str(error), peer)
        except asyncio.TimeoutError:  # must precede OSError, its base class since Python 3.11
            self._refuse("silent", peer)
        except OSError as error:
            self._refuse(error.strerror or str(error), peer)
        finally:
            self._handshakes.pop(connection, None)
            self._greeted.discard(connection)
            if channel is None:
                connection.close()

    async def _shake_hands(self, connection: socket.socket) -> tuple[int, bytes]:
        """Return the node at the other end, and the bytes that followed its proof."""
        loop = asyncio.get_running_loop()
        line, rest = await read_line(connection, b"")
        greeting = read_greeting(line)
        node, _, dialled = greeting
        if dialled not in self.addresses:
            raise HandshakeError("dialled another address")
        self._greeted.add(connection)
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

    def _refuse(self, why: str, peer: str) -> None:
        self._refused[why] += 1
        self._last_peer = peer or self._last_peer

    async def _report_refusals(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            if self._refused:
                reasons = ", ".join(f"{count} x {why}" for why, count in self._refused.most_common(3))
                total, self._refused = self._refused.total(), Counter()
                what = f"{counted(total, 'connection')} to port {self.port}"
                self._report(f"refused {what}: {reasons}; last from {self._last_peer}")


async def read_line(connection: socket.socket, received: bytes) -> tuple[bytes, bytes]:
    """Return the next line and the bytes after it. `received`: bytes already read.

    Raises:
        HandshakeError: if the line is too long, or the connection ends.
    """
    while b"\n" not in received:
        if len(received) > LONGEST:
            raise HandshakeError("speaks another protocol")
        data = await asyncio.get_running_loop().sock_recv(connection, LONGEST)
        if not data:
            raise HandshakeError("hung up")
        received += data
    line, _, rest = received.partition(b"\n")
    return line + b"\n", rest
