"""A connection between the memory of two nodes, with mutual proofs: `launch/wire/handshake.py`, then JSON and bytes."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from muster.jobs.basics.errors import UnreachableError
from muster.jobs.basics.reading import parse_json
from muster.launch.wire.handshake import LONGEST, WELCOME, AgentSide, HandshakeError, SupervisorSide, read_greeting

CONNECT_S: Final = 3.0
QUIET_S: Final = 10.0  # without a byte, after which the other end is considered lost
CHUNK_BYTES: Final = 1 << 18


@dataclass
class CopyConnection:
    """One authenticated connection."""

    socket: socket.socket
    reader: BinaryIO

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Receive a message.

        Raises:
            OSError: if it is not a valid one.
        """
        try:
            found = parse_json(self.reader.readline(LONGEST))
        except ValueError as error:
            raise OSError("the connection has ended") from error
        if not isinstance(found, dict):
            raise OSError("the other end speaks another protocol")
        return found

    def chunks(self, count: int) -> Iterator[bytes]:
        """Yield the next `count` bytes in pieces.

        Raises:
            UnreachableError: if the connection ends before.
        """
        while count:
            try:
                data = self.reader.read(min(count, CHUNK_BYTES))
            except OSError as error:
                raise UnreachableError(f"the connection is lost: {error}") from error
            if not data:
                raise UnreachableError("the connection has ended")
            count -= len(data)
            yield data


@contextmanager
def dialled(address: str, port: int, key: str) -> Iterator[CopyConnection]:
    """Connect to the memory of another node.

    Raises:
        UnreachableError: if the node cannot be reached, does not hold the key, or is lost within this context.
    """
    where = f"{address}:{port}"
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection, connection.makefile("rb") as reader:
            connection.settimeout(QUIET_S)
            wire, end = CopyConnection(connection, reader), AgentSide(key, 0, where)
            connection.sendall(end.greeting())
            connection.sendall(end.answer(wire.reader.readline(LONGEST)))
            if wire.reader.readline(LONGEST) != WELCOME:
                raise HandshakeError("refuses this node")
            yield wire
    except (OSError, HandshakeError) as error:
        raise UnreachableError(f"the node at {where}: {error or type(error).__name__}") from error


@contextmanager
def accepted(connection: socket.socket, address: str, key: str) -> Iterator[CopyConnection]:
    """Let the other end of a new connection prove that it holds the key.

    `address`: the one that it must have dialled; "" if this host does not know it.

    Raises:
        OSError, HandshakeError: if it does not.
    """
    connection.settimeout(QUIET_S)
    with connection.makefile("rb") as reader:
        wire = CopyConnection(connection, reader)
        _prove(wire, address, key)
        yield wire


def _prove(wire: CopyConnection, address: str, key: str) -> None:
    connection = wire.socket
    greeting = read_greeting(wire.reader.readline(LONGEST))
    if address and greeting[2] != address:
        raise HandshakeError("dialled another address")
    end = SupervisorSide(key, greeting, "copies", 0)
    connection.sendall(end.challenge())
    if not end.is_proved(wire.reader.readline(LONGEST)):
        raise HandshakeError("does not hold the key")
    connection.sendall(WELCOME)
