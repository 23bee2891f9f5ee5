"""The control channel between supervisor and agent: JSON lines over one of two carriers.

Pipe: the standard input and output of the agent's process, for transports that keep them (local, ssh).
TCP: the agent dials back and shows a token, for transports that do not (pdsh, srun, a pasted line).

To the agent      welcome, prepare, start, stop, bye
To the supervisor hello, prepared, started, report, exited, swept, log, heartbeat, broken
"""

import asyncio
import hmac
import json
import os
import secrets
import sys
from dataclasses import dataclass
from typing import Any, Final

LINE_LIMIT: Final = 1 << 24  # a start message holds argv and environment of all ranks of a node
DIAL_PAUSE_S: Final = 0.2
HELLO_TIMEOUT_S: Final = 10.0

Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other end has gone."""


@dataclass
class Channel:
    """One end: send and receive whole messages."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    source: asyncio.ReadTransport | None = None  # where reading and writing are two pipes
    node: int = -1  # whose channel this is, where that is known before its hello

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

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            ChannelClosed: the other end has gone, or does not speak our protocol.
        """
        try:
            line = await self.reader.readline()
            if not line.endswith(b"\n"):
                raise ChannelClosed("the connection ended")
            message = json.loads(line)
        except (ConnectionError, ValueError) as error:
            raise ChannelClosed(str(error)) from error
        if not isinstance(message, dict):
            raise ChannelClosed(f"not a message: {line[:80]!r}")
        return message

    def close(self) -> None:
        """Close this end; the other sees it at once."""
        self.writer.close()
        if self.source is not None:
            self.source.close()


async def over_pipes(source: int, sink: int) -> Channel:
    """Make the agent's end over two pipe descriptors."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), os.fdopen(sink, "wb", 0)
    )
    return Channel(reader, asyncio.StreamWriter(transport, protocol, reader, loop), reading)


async def to_process(process: asyncio.subprocess.Process) -> Channel:
    """Make the supervisor's end over the pipes of an agent's process."""
    assert process.stdin is not None
    assert process.stdout is not None
    return Channel(process.stdout, process.stdin)


async def dial(address: str, port: int, token: str, *, timeout_s: float) -> Channel:
    """Dial the supervisor until it answers, and show the token.

    Raises:
        ChannelClosed: nobody answered in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(address, port, limit=LINE_LIMIT), max(0.1, deadline - loop.time())
            )
        except (OSError, asyncio.TimeoutError) as error:
            if loop.time() >= deadline:
                raise ChannelClosed(f"{address}:{port} did not answer within {timeout_s:g} s") from error
            await asyncio.sleep(DIAL_PAUSE_S)
            continue
        channel = Channel(reader, writer)
        await channel.send({"token": token})
        return channel


class Listener:
    """The supervisor's end of the TCP carrier: a port that accepts whoever shows the token."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._server: asyncio.Server | None = None
        self._accepted: asyncio.Queue[Channel] = asyncio.Queue()

    async def open(self, address: str) -> None:
        """Bind a free port on `address`."""
        self._server = await asyncio.start_server(self._admit, address, 0, limit=LINE_LIMIT)
        self.port = self._server.sockets[0].getsockname()[1]

    async def accept(self) -> Channel:
        """Return the next channel whose token was right; the caller sets the deadline."""
        return await self._accepted.get()

    def close(self) -> None:
        """Accept no more; channels stay open."""
        if self._server is not None:
            self._server.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        try:
            shown = str((await asyncio.wait_for(channel.receive(), HELLO_TIMEOUT_S)).get("token", ""))
        except (ChannelClosed, asyncio.TimeoutError):
            shown = ""
        if hmac.compare_digest(shown.encode(), self.token.encode()):
            self._accepted.put_nowait(channel)
        else:
            print(
                f"muster: refused a connection from {writer.get_extra_info('peername')}: wrong token", file=sys.stderr
            )
            channel.close()
