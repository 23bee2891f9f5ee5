"""Shards on their way from the memory of one node to that of another: a connection for each, with mutual proofs.

    dialler                                               listener
      the handshake of launch/wire/handshake.py    ←───→
      {"do": "put", "name": …, "writer": 2,
       "bytes": b, "sha256": …, "ok": n}           ────→
                                                   ←────  {"is": "wanted"}, or "kept": it has this shard already
      n bytes of the .ok, b bytes of the shard     ────→
                                                   ←────  {"is": "kept"}, or {"why": …}

      {"do": "get", "name": …, "writer": 2}        ────→
                                                   ←────  {"bytes": b, "sha256": …, "ok": n}, then both files

The receiver compares the SHA-256 of what it has received with that of the .ok, which is sealed (`jobs/checkpoint/`).
"""

import hashlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from muster.jobs.basics.errors import BadCheckpointError, MusterError, UnreachableError
from muster.jobs.basics.reading import parse_json
from muster.jobs.checkpoint import disk, sealed
from muster.jobs.checkpoint.commit import begin
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.checkpoint.shard import ShardRecord, read_ok
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.wire.handshake import LONGEST, WELCOME, AgentSide, HandshakeError, SupervisorSide, read_greeting

CONNECT_S: Final = 3.0
QUIET_S: Final = 10.0  # without a byte, after which the other end is considered lost
CHUNK_BYTES: Final = 1 << 18
KEPT, WANTED = {"is": "kept"}, {"is": "wanted"}

Pace = Callable[[int], None]  # called before a number of bytes is sent
Arrived = tuple[CheckpointDir, ShardRecord]


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


def record_of(folder: CheckpointDir, writer: int) -> ShardRecord | None:
    """Return the record of a complete shard; None if there is none."""
    try:
        with disk.opened_folder(folder.path) as within:
            return read_ok(folder, within, writer)
    except (FileNotFoundError, MusterError):
        return None


def place_of(run: RunDir, told: Mapping[str, Any]) -> tuple[CheckpointDir, int]:
    """Return the checkpoint and the shard that a message is about.

    Raises:
        OSError: if the message is invalid.
    """
    found, writer = step_and_attempt(str(told.get("name"))), told.get("writer")
    if found is None or type(writer) is not int or writer < 0:
        raise OSError("the other end speaks another protocol")
    return run.checkpoint(*found), writer


def put(wire: CopyConnection, folder: CheckpointDir, record: ShardRecord, pace: Pace) -> int:
    """Send a shard, unless the other node has it; return the number of bytes sent.

    Raises:
        OSError: if the connection is lost.
        UnreachableError: if the other node cannot keep it.
    """
    about = {"do": "put", "name": folder.name, "writer": record.writer}
    wire.say({**about, **_sizes(folder, record)})
    if (answer := wire.hear()) == WANTED:
        _send(wire, folder, record, pace)
        answer = wire.hear()
        if answer == KEPT:
            return record.bytes
    if answer != KEPT:
        raise UnreachableError(str(answer.get("why", "refuses the copy"))[:LONGEST])
    return 0


def get(wire: CopyConnection, folder: CheckpointDir, writer: int) -> int:
    """Receive a shard that this node lacks; return the number of bytes.

    Raises:
        OSError: if the connection is lost.
        MusterError: if the other node does not have the shard, or it cannot be stored.
    """
    wire.say({"do": "get", "name": folder.name, "writer": writer})
    told = wire.hear()
    if "why" in told:
        raise UnreachableError(str(told["why"])[:LONGEST])
    return _receive(wire, folder, writer, told)


def answer(
    wire: CopyConnection, run: RunDir, is_expected: Callable[[CheckpointDir, int], None], pace: Pace
) -> Arrived | None:
    """Answer one request of another node; return the shard that it has put here, if any.

    `is_expected` is called before a received shard becomes visible.

    Raises:
        OSError: if the connection is lost, or the request is invalid.
    """
    told = wire.hear()
    folder, writer = place_of(run, told)
    record = record_of(folder, writer)
    if told.get("do") == "get":
        if record is None:
            wire.say({"why": f"{folder.name}: its shard {writer} is not here"})
        else:
            wire.say(_sizes(folder, record))
            _send(wire, folder, record, pace)
        return None
    if record is not None and record.sha256 == told.get("sha256"):
        wire.say(KEPT)
        return folder, record
    is_expected(folder, writer)
    wire.say(WANTED)
    try:
        begin(run, *(step_and_attempt(folder.name) or (0, 0)))
        _receive(wire, folder, writer, told)
    except MusterError as error:
        wire.say({"why": str(error)[: LONGEST // 2]})
        return None
    wire.say(KEPT)
    record = record_of(folder, writer)
    return None if record is None else (folder, record)


def _sizes(folder: CheckpointDir, record: ShardRecord) -> dict[str, Any]:
    return {
        "bytes": record.bytes,
        "sha256": record.sha256,
        "ok": folder.ok(record.writer).stat().st_size,
    }


def _send(wire: CopyConnection, folder: CheckpointDir, record: ShardRecord, pace: Pace) -> None:
    wire.socket.sendall(folder.ok(record.writer).read_bytes())
    with folder.shard(record.writer).open("rb") as file:
        at = 0
        while at < record.bytes:
            count = min(CHUNK_BYTES, record.bytes - at)
            pace(count)
            sent = wire.socket.sendfile(file, at, count)
            if not sent:
                raise OSError("the shard has become shorter")
            at += sent


def _receive(wire: CopyConnection, folder: CheckpointDir, writer: int, told: Mapping[str, Any]) -> int:
    """Receive the two files of a shard, and check that they belong together; errors as for `get`."""
    count, expected, ok = told.get("bytes"), told.get("sha256"), told.get("ok")
    if type(count) is not int or type(ok) is not int or not 0 < ok <= sealed.MAX_BYTES or count <= 0:
        raise OSError("the other end speaks another protocol")
    text, digest = b"".join(wire.chunks(ok)), hashlib.sha256()

    def checked() -> Iterator[bytes]:
        for chunk in wire.chunks(count):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != expected:
            raise BadCheckpointError(f"{folder.name}: shard {writer} has changed on its way")

    disk.write_file(folder.path, folder.shard(writer).name, checked(), reserve=count)
    disk.write_file(folder.path, folder.ok(writer).name, [text])
    record = record_of(folder, writer)
    if record is None or (record.sha256, record.bytes) != (expected, count):
        folder.ok(writer).unlink(missing_ok=True)
        raise BadCheckpointError(f"{folder.name}: the record of shard {writer} is about another shard")
    return count
