"""A port that any process may connect to. Connections that pass a handshake are let in; all others cannot do harm.

    connection ──→ is one expected? ──no──→ closed unread
                        │ yes
                   the handshake: at most UNPROVED at once, each `handshake_s`
                        │ passed
                   belongs to the caller

A turn of the event loop accepts at most ACCEPTS connections. Refusals are counted and reported once a second.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from muster.jobs.basics.handshake import LONGEST, HandshakeError
from muster.jobs.basics.words import counted

BACKLOG: Final = 4096  # all agents of a large run dial at once
ACCEPTS: Final = 16  # per turn of the event loop, so that the handshakes and all other tasks run in between
UNPROVED: Final = 256  # maximum handshakes at once, plus `more`; a further one drops the oldest without greeting
HANDSHAKE_S: Final = 10.0  # for one connection; longer if many are expected
HANDSHAKES_PER_S: Final = 400  # that a slow machine completes when all agents dial at once
REPORT_S: Final = 1.0
PAUSE_S: Final = 0.05  # pause after an error of accept(2), such as running out of descriptors
IDLE_S: Final = 0.005  # pause after ACCEPTS connections while none is expected


class Door:
    """The listening socket, and the handshakes of its connections.

    `admit` runs one handshake and takes the connection over, or raises an error. `more`: how many connections are
    expected at once. `expects`: returns False while none is expected.
    """

    def __init__(
        self,
        admit: Callable[[socket.socket], Coroutine[Any, Any, None]],
        *,
        more: int,
        report: Callable[[str], None],
        expects: Callable[[], bool] = lambda: True,
    ) -> None:
        self._admit_one = admit
        self._most = UNPROVED + more
        self._handshake_s = HANDSHAKE_S + more / HANDSHAKES_PER_S
        self._report = report
        self._expects = expects
        self._socket: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}
        self._greeted: set[socket.socket] = set()
        self._refused: Counter[str] = Counter()
        self._last_peer = ""
        self._reporting: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The number of the port."""
        assert self._socket is not None
        port: int = self._socket.getsockname()[1]
        return port

    def open(self, listening: socket.socket) -> None:
        """Accept the connections of a listening socket, which belongs to this object from now on."""
        listening.setblocking(False)
        self._socket = listening
        self._reporting = asyncio.create_task(self._report_refusals())
        self.wake()

    def wake(self) -> None:
        """Accept connections again, after a pause or because one is expected now."""
        if self._pause is not None:
            self._pause.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Close the port and all connections that have not passed their handshake."""
        if self._socket is None or self._reporting is None:
            return
        self._rest(None)
        for task in (self._reporting, *self._handshakes.values()):
            task.cancel()
        self._socket.close()
        self._socket = None

    def has_greeted(self, connection: socket.socket) -> None:
        """Prefer this connection to silent ones, because it has sent a valid first line."""
        self._greeted.add(connection)

    def _rest(self, pause_s: float | None) -> None:
        """Stop accepting, for `pause_s` seconds or for good."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)  # type: ignore[arg-type]
        if self._pause is not None:
            self._pause.cancel()
        self._pause = None if pause_s is None else loop.call_later(pause_s, self.wake)

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(ACCEPTS):
            try:
                connection, (address, *_) = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the peer has already closed, or no descriptor is free
                self._refuse(error.strerror or str(error), "")
                self._rest(PAUSE_S)
                return
            if not self._expects():
                self._refuse("no node is expected", address)
                connection.close()
                continue
            if len(self._handshakes) >= self._most:
                oldest = next((each for each in self._handshakes if each not in self._greeted), None)
                self._handshakes.pop(oldest or next(iter(self._handshakes))).cancel()
                self._refuse("too many connections", address)
            connection.setblocking(False)
            self._handshakes[connection] = task = asyncio.create_task(self._admit(connection))
            task.add_done_callback(partial(self._ended, connection, address))
        if not self._expects():
            self._rest(IDLE_S)

    async def _admit(self, connection: socket.socket) -> None:
        await asyncio.wait_for(self._admit_one(connection), self._handshake_s)

    def _ended(self, connection: socket.socket, peer: str, task: asyncio.Task[None]) -> None:
        """Close a connection unless its handshake has succeeded."""
        self._handshakes.pop(connection, None)
        self._greeted.discard(connection)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            connection.close()
        if isinstance(error, asyncio.TimeoutError):  # since Python 3.11 it is an OSError
            self._refuse("silent", peer)
        elif error is not None:
            self._refuse(getattr(error, "strerror", None) or str(error), peer)

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
