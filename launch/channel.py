"""The control channel between supervisor and agent: JSON lines over one of two carriers.

Pipe: the standard input and output of the agent's process, for transports that keep them (local, ssh).
TCP: the agent dials back and shows a token, for transports that do not (pdsh, srun, a pasted line).

To the agent      beat, inspect, prepare, reach, start, hold, stop_at, dump, stop, bye
To the supervisor hello, heartbeat, inspected, prepared, reached, started, report, exited, held, stacks, swept, log,
                  file, told, broken; all but the hello with the attempt that they are about
"""

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
import sys
from dataclasses import dataclass
from typing import IO, Any, Final

from jobs import ports
from jobs.errors import RefusedError
from launch.agent import WRONG_TOKEN

LINE_LIMIT: Final = 1 << 24  # a start message holds argv and environment of all ranks of a node
HELLO_TIMEOUT_S: Final = 10.0
CHATTER_LINES: Final = 1000
BACKLOG: Final = 4096  # all agents of a large run dial at once

Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other end has gone."""


class NotAMessage(ChannelClosed):
    """The other end does not speak our protocol."""


@dataclass
class Channel:
    """One end: send and receive whole messages."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    source: asyncio.ReadTransport | None = None  # where reading and writing are two pipes
    node: int = -1  # whose channel this is, where that is known before its hello
    first: Message | None = None  # received, and still to be given out

    async def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other end has gone.
        """
        try:
            self.writer.write((json.dumps(message) + "\n").encode())
            await self.writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise ChannelClosed(str(error)) from error

    def post(self, message: Message) -> None:
        """Send one message without waiting until the other end takes it.

        Raises:
            ChannelClosed: the other end is known to have gone.
        """
        if self.writer.is_closing():
            raise ChannelClosed("the connection ended")
        self.writer.write((json.dumps(message) + "\n").encode())

    async def wait_for_hello(self) -> None:
        """Wait for the agent's first word; what a shell's start files printed before it is passed over.

        Raises:
            ChannelClosed: the other end has gone, or says too much that is no hello.
        """
        for _ in range(CHATTER_LINES):
            try:
                self.first = await self.receive()
                return
            except NotAMessage:
                continue
        raise ChannelClosed("no hello among what it said")

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            ChannelClosed: the other end has gone, or does not speak our protocol.
        """
        if self.first is not None:
            message, self.first = self.first, None
            return message
        try:
            line = await self.reader.readline()
        except (ConnectionError, ValueError) as error:
            raise ChannelClosed(str(error)) from error
        if not line.endswith(b"\n"):
            raise ChannelClosed("the connection ended")
        try:
            received = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NotAMessage(str(error)) from error
        if not isinstance(received, dict):
            raise NotAMessage(f"not a message: {line[:80]!r}")
        return received

    def abort(self) -> None:
        """Close this end without waiting for what is still to be sent: the other end does not take it."""
        if not self.writer.transport.is_closing():  # asyncio's pipes do not take an abort after their end
            self.writer.transport.abort()
        if self.source is not None:
            self.source.close()

    def close(self) -> None:
        """Close this end; the other sees it at once."""
        self.writer.close()
        if self.source is not None:
            self.source.close()


async def over_pipes(source: IO[bytes], sink: IO[bytes]) -> Channel:
    """Make an end over two pipes."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), sink)
    return Channel(reader, asyncio.StreamWriter(transport, protocol, reader, loop), reading)


async def over_socket(connection: socket.socket) -> Channel:
    """Make the agent's end over a connection that has shown its token."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT)
    return Channel(reader, writer)


class Listener:
    """The supervisor's end of the TCP carrier: a port that accepts whoever shows the token."""

    def __init__(self, token: str = "") -> None:
        self.token = token or secrets.token_urlsafe(24)
        self.port = 0
        self._server: asyncio.Server | None = None
        self._accepted: asyncio.Queue[Channel] = asyncio.Queue()

    async def open(self, address: str, port: int = 0) -> None:
        """Listen at `address` ("": every address of this host), on the given port or on one of our choice.

        Raises:
            RefusedError: the given port is taken or may not be bound.
        """
        if port:
            try:
                listening = socket.create_server((address, port), backlog=BACKLOG)
            except OSError as error:
                reason = error.strerror or error
                raise RefusedError(f"port {port}: cannot be bound here: {reason}; choose another --port") from error
        else:
            listening = ports.bind(address, backlog=BACKLOG)
        self.port = listening.getsockname()[1]
        self._server = await asyncio.start_server(self._admit, sock=listening, limit=LINE_LIMIT, backlog=BACKLOG)

    async def accept(self) -> Channel:
        """Return the next channel whose token was right; the caller sets the deadline."""
        return await self._accepted.get()

    def close(self) -> None:
        """Accept no more; channels stay open."""
        if self._server is not None:
            self._server.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        first: Message = {}
        with contextlib.suppress(ChannelClosed, asyncio.TimeoutError):
            first = await asyncio.wait_for(channel.receive(), HELLO_TIMEOUT_S)
        shown = str(first.get("token", ""))
        if hmac.compare_digest(shown.encode(), self.token.encode()):
            self._accepted.put_nowait(channel)
        else:
            print(
                f"muster: refused a connection from {writer.get_extra_info('peername')}: wrong token", file=sys.stderr
            )
            if isinstance(first.get("token"), str):
                writer.write(WRONG_TOKEN)  # for whoever pasted the line, and looks at how it ends
            channel.close()
