"""The control channel between supervisor and agent.

It carries typed messages as JSON lines over one of two carriers:

Pipe   the standard input and output of the agent's process, for transports that connect them (local, ssh); the
       process at the other end was started by the supervisor or authenticated by ssh
TCP    a connection that the agent opens, for all other transports (pdsh, srun, submitit, a pasted line); both ends
       prove that they hold the node's key (handshake.py) before any message is read
"""

import asyncio
import socket
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Final

from muster.jobs.basics.terminal import printable
from muster.launch.wire.codec import KIND, ProtocolError, decode, encode
from muster.launch.wire.messages import FROM_AGENT, TO_AGENT, Hello

START_BYTES: Final = 1 << 24  # the longest message to an agent: arguments and environment of all ranks of a node
LINE_BYTES: Final = 1 << 23  # the longest message from an agent: a line of 1 MiB with every character escaped
CHATTER_BYTES: Final = 1 << 26  # maximum of other text that a node may print into its channel
PRINTED_BYTES: Final = 1 << 10  # of that text, the last part is kept for messages
QUOTED: Final = 200  # characters
CHUNK: Final = 1 << 16
MESSAGE: Final = b'{"%s": "' % KIND.encode()  # every message begins with this
HELLO: Final = MESSAGE + b'Hello"'
UNHANDLED: Final = 256  # maximum number of one node's messages in the inbox


class ChannelClosed(Exception):
    """The other end has closed the channel."""


class NotAMessage(ChannelClosed):
    """The other end violates the protocol."""


@dataclass
class Channel:
    """One end of a channel: sends and receives whole messages. `kinds`: the messages that it may receive."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    kinds: Mapping[str, type]
    source: asyncio.ReadTransport | None = None  # set if reading and writing use two separate pipes
    node: int = -1  # at the supervisor's end: the number of the agent's node
    unhandled: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UNHANDLED))
    printed: bytes = b""  # the last text that is no message, such as the output of a shell's start-up files
    _printed_bytes: int = 0
    _mixed: bool = False  # a shell may print into this channel
    _rest: bytes = b""  # received, but not yet read
    _first: Any = None  # received by `wait_for_hello`, returned by the next `receive`

    async def send(self, message: object) -> None:
        """Send one message.

        Raises:
            ChannelClosed: if the other end has closed.
        """
        try:
            self.writer.write(encode(message))
            await self.writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise ChannelClosed(str(error)) from error

    def post(self, message: object) -> None:
        """Queue one message for sending; do not wait for the other end to read it.

        Raises:
            ChannelClosed: if the other end is known to have closed.
        """
        if self.writer.is_closing():
            raise ChannelClosed("the connection ended")
        self.writer.write(encode(message))

    async def wait_for_hello(self) -> None:
        """Wait for the agent's first message. Skip all text that a shell's start-up files print before or after it.

        The text need not end with a newline: it may set a colour or the title of a window.

        Raises:
            ChannelClosed: if the other end has closed, or sends too much without a hello.
        """
        self._mixed, found = True, b""
        while self._first is None:
            while (at := found.rfind(HELLO)) < 0:
                self._note(data := await self._received(self.reader.read(CHUNK)))
                found = found[-len(HELLO) :] + data
            self._rest = found[at:]
            line = await self._line()
            try:
                self._first = decode(line, self.kinds)
            except ProtocolError:
                found, self._rest = self._rest, b""

    async def receive_hello(self) -> Hello:
        """Return the agent's first message. Errors as for `receive`."""
        first = await self.receive()
        if not isinstance(first, Hello):
            raise NotAMessage(f"expected Hello, got {type(first).__name__}")
        return first

    async def receive(self) -> Any:
        """Return the next message, one of `kinds`.

        Raises:
            ChannelClosed: if the other end has closed.
            NotAMessage: if the other end sends anything that is not allowed.
        """
        if self._first is not None:
            message, self._first = self._first, None
            return message
        line = await self._line()
        while self._mixed and not line.startswith(MESSAGE):
            text, begin, rest = line.partition(MESSAGE)
            self._note(text)
            line = begin + rest or await self._line()
        try:
            return decode(line, self.kinds)
        except ProtocolError as error:
            raise NotAMessage(str(error)) from error

    async def _line(self) -> bytes:
        if b"\n" not in self._rest:
            self._rest += await self._received(self.reader.readline())
        line, newline, self._rest = self._rest.partition(b"\n")
        if not newline:
            raise ChannelClosed("the connection ended")
        return line + newline

    async def _received(self, reading: Awaitable[bytes]) -> bytes:
        try:
            if data := await reading:
                return data
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from error
        except ValueError as error:
            raise NotAMessage(f"its line is too long: {error}") from error
        raise ChannelClosed("the connection ended")

    def _note(self, text: bytes) -> None:
        """Keep the last part of a text that is no message.

        Raises:
            NotAMessage: if the other end has printed too much.
        """
        self.printed = (self.printed + text)[-PRINTED_BYTES:]
        self._printed_bytes += len(text)
        if self._printed_bytes > CHATTER_BYTES:
            raise NotAMessage(f"its shell printed more than {CHATTER_BYTES >> 20} MB{quoted(text)}")

    def abort(self) -> None:
        """Close this end without sending queued messages, because the other end does not read them."""
        if not self.writer.transport.is_closing():  # asyncio's pipes cannot be aborted once closed
            self.writer.transport.abort()
        if self.source is not None:
            self.source.close()

    def close(self) -> None:
        """Close this end; the other end notices at once."""
        self.writer.close()
        if self.source is not None:
            self.source.close()


def quoted(printed: bytes) -> str:
    """Return the end of what a node has printed, as an addition to a message; "" if it has printed only blanks."""
    text = " / ".join(filter(None, map(str.strip, printed.decode(errors="replace").split("\n"))))
    return printable(f"; printed so far: {text if len(text) <= QUOTED else f'…{text[-QUOTED:]}'}") if text else ""


async def over_pipes(source: IO[bytes], sink: IO[bytes], *, node: int | None = None) -> Channel:
    """Return a channel over two pipes: the supervisor's end for `node`, or the agent's end if `node` is None."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=START_BYTES if node is None else LINE_BYTES)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), sink)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    if node is None:
        return Channel(reader, writer, TO_AGENT, reading)
    return Channel(reader, writer, FROM_AGENT, reading, node)


async def over_socket(connection: socket.socket, *, node: int | None = None, received: bytes = b"") -> Channel:
    """Return a channel over a connection after its handshake. `received`: bytes already read from the connection.

    `node`: as for `over_pipes`.
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
