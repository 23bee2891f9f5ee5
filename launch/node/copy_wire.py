"""A connection between the memory of two nodes, with mutual proofs (`launch/wire/handshake.py`)."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from muster.jobs.basics.errors import UnreachableError
from muster.jobs.checkpoint.remote import FileConnection
from muster.launch.wire.handshake import LONGEST, WELCOME, AgentSide, HandshakeError, SupervisorSide, read_greeting

CONNECT_S: Final = 3.0
QUIET_S: Final = 10.0  # without a byte, after which the other end is considered lost


@contextmanager
def dialled(address: str, port: int, key: str) -> Iterator[FileConnection]:
    """Connect to the memory of another node.

    Raises:
        UnreachableError: if the node cannot be reached, does not hold the key, or is lost within this context.
    """
    where = f"{address}:{port}"
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection, connection.makefile("rb") as reader:
            connection.settimeout(QUIET_S)
            end = AgentSide(key, 0, where)
            connection.sendall(end.greeting())
            connection.sendall(end.answer(reader.readline(LONGEST)))
            if reader.readline(LONGEST) != WELCOME:
                raise HandshakeError("refuses this node")
            yield FileConnection(connection, reader)
    except (OSError, HandshakeError) as error:
        raise UnreachableError(f"the node at {where}: {error or type(error).__name__}") from error


@contextmanager
def accepted(connection: socket.socket, address: str, key: str) -> Iterator[FileConnection]:
    """Let the other end of a new connection prove that it holds the key.

    `address`: the one that it must have dialled; "" if this host does not know it.

    Raises:
        OSError, HandshakeError: if it does not.
    """
    connection.settimeout(QUIET_S)
    with connection.makefile("rb") as reader:
        greeting = read_greeting(reader.readline(LONGEST))
        if address and greeting[2] != address:
            raise HandshakeError("dialled another address")
        end = SupervisorSide(key, greeting, "copies", 0)
        connection.sendall(end.challenge())
        if not end.is_proved(reader.readline(LONGEST)):
            raise HandshakeError("does not hold the key")
        connection.sendall(WELCOME)
        yield FileConnection(connection, reader)
