"""The supervisor's port for agents that dial back. Anybody who reaches it may connect; that must not hurt the run.

    connection ──→ is a node expected? ──no──→ closed unread
                        │ yes
                   at most UNPROVED at once, HANDSHAKE_S and 1 KiB a line each, no JSON: handshake.py
                        │ proved
                   a channel of that node, which is expected no more

The port stays bound to the end of the run, so that nobody else can take it. Refusals are counted and reported once a
second.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.words import counted
from muster.jobs.machine import ports
from muster.launch.wire.channel import Channel, over_socket
from muster.launch.wire.handshake import (
    LONGEST,
    REFUSED,
    WELCOME,
    HandshakeError,
    SupervisorSide,
    new_secret,
    node_key,
    read_greeting,
)

BACKLOG: Final = 4096  # all agents of a large run dial at once
UNPROVED: Final = 256  # connections in their handshake at once; the oldest goes first, before it has greeted
HANDSHAKE_S: Final = 10.0
REPORT_S: Final = 1.0
PAUSE_S: Final = 0.05  # after an error of accept(2), such as no free descriptor


class Listener:
    """Accepts the agents of `nodes` nodes. `secret`: the run's, where agents were given their keys beforehand."""

    def __init__(
        self, nodes: int, *, run: str, attempt: int = 0, secret: str = "", report: Callable[[str], None]
    ) -> None:
        self.secret = secret or new_secret()
        self.port = 0
        self.expected = set(range(nodes))
        self.addresses: list[str] = []  # what agents may have dialled
        self._nodes = nodes
        self._run = run
        self._attempt = attempt
        self._report = report
        self._socket: socket.socket | None = None
        self._accepted: asyncio.Queue[Channel] = asyncio.Queue()
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}
        self._greeted: set[socket.socket] = set()  # of those, the ones that sent an agent's first line
        self._refused: Counter[str] = Counter()
        self._last_peer = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, address: str, port: int = 0, *, dialled_as: Iterable[str] = ()) -> None:
        """Listen at `address` ("": every address of this host), on the given port or on one of our choice.

        Agents have to dial one of `dialled_as`, or `address` itself.

        Raises:
            RefusedError: if the given port is taken or may not be bound.
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
        """Return the channel of the next node that has proved itself; the caller sets the deadline."""
        return await self._accepted.get()

    def expect(self, node: int) -> None:
        """Let an agent of this node in, once."""
        self.expected.add(node)

    def close(self) -> None:
        """Give the port back. Channels stay open, but for those that nobody has accepted."""
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
            except OSError as error:  # the peer has gone again, or there is no descriptor
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
            await asyncio.sleep(0)  # it takes its first step before anybody else comes

    async def _admit(self, connection: socket.socket, peer: str) -> None:
        """Make a connection that proves itself a channel, and close any other."""
        channel: Channel | None = None
        try:
            node, rest = await asyncio.wait_for(self._shake_hands(connection), HANDSHAKE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = await over_socket(connection, node=node, received=rest)
            self._accepted.put_nowait(channel)
        except HandshakeError as error:
            self._refuse(str(error), peer)
        except asyncio.TimeoutError:  # from Python 3.11 on this is an OSError, so it stands first
            self._refuse("silent", peer)
        except OSError as error:
            self._refuse(error.strerror or str(error), peer)
        finally:
            self._handshakes.pop(connection, None)
            self._greeted.discard(connection)
            if channel is None:
                connection.close()

    async def _shake_hands(self, connection: socket.socket) -> tuple[int, bytes]:
        """Return the node at the other end, and what it has sent behind its proof."""
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
            why = f"node {node} is not expected now: it is there already, or not of this run"
            await loop.sock_sendall(connection, f"{REFUSED}{why}\n".encode())
            raise HandshakeError(f"node {node} is not expected")
        self.expected.remove(node)
        try:
            await loop.sock_sendall(connection, WELCOME)
        except BaseException:
            self.expected.add(node)  # it may dial again
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
    """Return the next line, and what came behind it; `received` was read before.

    Raises:
        HandshakeError: if it is too long, or the connection ends.
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
