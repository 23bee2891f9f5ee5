"""The control channel between supervisor and agent: typed messages as JSON lines over one of two carriers.

Pipe: the standard input and output of the agent's process, for transports that keep them (local, ssh). Whoever holds
      the other end was started by us, or was authenticated by ssh.
TCP:  the agent dials back, for transports that do not (pdsh, srun, submitit, a pasted line); both ends prove that
      they hold the node's key (handshake.py) before a message is read.
"""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Final

from muster.launch.wire.codec import ProtocolError, decode, encode
from muster.launch.wire.messages import FROM_AGENT, TO_AGENT, Hello

START_BYTES: Final = 1 << 24  # the longest message to an agent: argv and environment of all ranks of a node
LINE_BYTES: Final = 1 << 23  # the longest from an agent: a line of 1 MiB whose every character is escaped
CHATTER_LINES: Final = 1000
UNHANDLED: Final = 256  # messages of one node that may wait to be handled


class ChannelClosed(Exception):
    """The other end has gone."""


class NotAMessage(ChannelClosed):
    """The other end does not speak our protocol."""


@dataclass
class Channel:
    """One end: send and receive whole messages. `kinds` are those that it may receive."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kinds: Mapping[str, type]
    source: asyncio.ReadTransport | None = None  # where reading and writing are two pipes
    node: int = -1  # the supervisor's end: whose channel this is
    unhandled: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UNHANDLED))
    _first: Any = None  # received, and still to be given out

    async def send(self, message: object) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other end has gone.
        """
        try:
            self.writer.write(encode(message))
            await self.writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise ChannelClosed(str(error)) from error

    def post(self, message: object) -> None:
        """Send one message without waiting until the other end takes it.

        Raises:
            ChannelClosed: the other end is known to have gone.
        """
        if self.writer.is_closing():
            raise ChannelClosed("the connection ended")
        self.writer.write(encode(message))

    async def wait_for_hello(self) -> None:
        """Wait for the agent's first message; lines that a shell's start files printed before it are skipped.

        Raises:
            ChannelClosed: the other end has gone, or sent too much without a hello.
        """
        for _ in range(CHATTER_LINES):
            try:
                self._first = await self.receive()
                return
            except NotAMessage:
                continue
        raise ChannelClosed("no hello among what it printed")

    async def receive_hello(self) -> Hello:
        """Return the agent's first message; errors as `receive`."""
        first = await self.receive()
        if not isinstance(first, Hello):
            raise NotAMessage(f"expected Hello, got {type(first).__name__}")
        return first

    async def receive(self) -> Any:
        """Return the next message, one of `kinds`.

        Raises:
            ChannelClosed: the other end has gone.
            NotAMessage: what it sent is not allowed.
        """
        if self._first is not None:
            message, self._first = self._first, None
            return message
        try:
            line = await self.reader.readline()
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from error
        except ValueError as error:
            raise NotAMessage(f"its line is too long: {error}") from error
        if not line.endswith(b"\n"):
            raise ChannelClosed("the connection ended")
        try:
            return decode(line, self.kinds)
        except ProtocolError as error:
            raise NotAMessage(str(error)) from error

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


async def over_pipes(source: IO[bytes], sink: IO[bytes], *, node: int | None = None) -> Channel:
    """Make an end over two pipes: the supervisor's for a node, or, without one, the agent's."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=START_BYTES if node is None else LINE_BYTES)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), sink)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    if node is None:
        return Channel(reader, writer, TO_AGENT, reading)
    return Channel(reader, writer, FROM_AGENT, reading, node)


async def over_socket(connection: socket.socket, *, node: int | None = None, received: bytes = b"") -> Channel:
    """Make an end over a connection whose two ends have proved themselves, and of which `received` was read already.

    `node` as for `over_pipes`.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=START_BYTES if node is None else LINE_BYTES)
    reader.feed_data(received)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.create_connection(lambda: protocol, sock=connection)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    if node is None:
        return Channel(reader, writer, TO_AGENT)
    return Channel(reader, writer, FROM_AGENT, node=node)
