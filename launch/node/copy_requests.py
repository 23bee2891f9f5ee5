"""The requests of one node's memory to that of another, over an authenticated connection (`jobs/checkpoint/remote.py`).

    dialler                                               listener
      {"do": "put", "name": …, "file": …, "bytes": n}
      and n bytes                                  ────→
                                                   ←────  {"bytes": n}, or {"why": …}

      {"do": "get", "name": …, "file": …,
       "at": offset, "bytes": n}                   ────→
                                                   ←────  {"bytes": b, "sha256": …} and b bytes, or {"why": …}

A shard is put before its .ok, which makes it count. The SHA-256 of a shard is computed once when it is written, and
compared before a restart reads it: doing so for every copy, too, would slow the ranks. Any number of requests may
follow each other.
"""

import asyncio
import hashlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics.errors import BadCheckpointError, MusterError
from muster.jobs.basics.handshake import WELCOME, HandshakeError, SupervisorSide, node_key, read_greeting
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.commit import begin
from muster.jobs.checkpoint.names import position, step_and_attempt
from muster.jobs.checkpoint.remote import CHUNK_BYTES, MOST_READ, READER, FileConnection
from muster.jobs.checkpoint.shard import ShardRecord, read_ok
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.wire.door import read_line

SHARD: Final = re.compile(r"shard-([0-9]{5,6})\.(safetensors|ok)")
OF_ALL: Final = re.compile(r"MANIFEST\.json|nodes-[0-9]{3,9}\.json")

Arrived = tuple[CheckpointDir, ShardRecord]


async def proved(
    connection: socket.socket, address: str, secret: str, has_greeted: Callable[[socket.socket], None]
) -> bool:
    """Require the other end of a new connection to prove that it has the secret, or the key with which ranks read.

    `address`: the one that it must have dialled; "" if this host does not know it. Return whether it may send files.

    Raises:
        OSError, HandshakeError: if it does not.
    """
    loop = asyncio.get_running_loop()
    line, rest = await read_line(connection, b"")
    greeting = read_greeting(line)
    if address and greeting[2] != address:
        raise HandshakeError("dialled another address")
    has_greeted(connection)
    is_agent = greeting[0] != READER
    end = SupervisorSide(secret if is_agent else node_key(secret, READER), greeting, "copies", 0)
    await loop.sock_sendall(connection, end.challenge())
    line, rest = await read_line(connection, rest)
    if not end.is_proved(line):
        raise HandshakeError("does not hold the key")
    if rest:
        raise HandshakeError("speaks another protocol")
    await loop.sock_sendall(connection, WELCOME)
    return is_agent


def record_of(folder: CheckpointDir, writer: int) -> ShardRecord | None:
    """Return the record of a complete shard; None if there is none."""
    try:
        with disk.opened_folder(folder.path) as within:
            return read_ok(folder, within, writer)
    except (FileNotFoundError, MusterError):
        return None


def writers_in(folder: CheckpointDir) -> list[int]:
    """List the shards that are complete in a folder; none if it has been deleted."""
    try:
        found = [SHARD.fullmatch(name) for name in os.listdir(folder.path)]  # noqa: PTH208
    except OSError:
        return []
    return sorted(int(each[1]) for each in found if each is not None and each[2] == "ok")


def put(wire: FileConnection, folder: CheckpointDir, record: ShardRecord, pause: Callable[[int], None]) -> None:
    """Send a shard. `pause` is called before each chunk with its number of bytes.

    Raises:
        OSError: if the connection is lost.
        UnreachableError: if the other node cannot keep it.
    """
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)  # so that messages of ranks wait little
    for path in (folder.shard(record.writer), folder.ok(record.writer)):
        with path.open("rb") as file:
            size, at = os.fstat(file.fileno()).st_size, 0
            wire.say({"do": "put", "name": folder.name, "file": path.name, "bytes": size})
            while at < size:
                count = min(CHUNK_BYTES, size - at)
                pause(count)
                sent = wire.socket.sendfile(file, at, count)
                if not sent:
                    raise OSError("the shard has become shorter")
                at += sent
        wire.answer()


@dataclass(frozen=True)
class Answering:
    """What a node needs to answer other nodes. `expect` is called before a received shard becomes visible."""

    run: RunDir
    expect: Callable[[CheckpointDir, int], None]

    def answer(self, wire: FileConnection) -> Arrived | None:
        """Answer one request of another node; return the shard that is complete with it, if any.

        Raises:
            OSError: if the connection is lost, or the request is invalid.
        """
        told = wire.hear()
        name, file, count = str(told.get("name")), str(told.get("file")), told.get("bytes")
        shard = SHARD.fullmatch(file)
        if step_and_attempt(name) is not None and type(count) is int and count > 0:
            folder = CheckpointDir(self.run.checkpoints / name)
            if told.get("do") == "put" and shard is not None and wire.may_put:
                return self._put(wire, folder, file, count, int(shard[1]) if shard[2] == "ok" else None)
            if told.get("do") == "get" and (shard or OF_ALL.fullmatch(file)):
                self._get(wire, folder, file, told)
                return None
        raise OSError("the other end speaks another protocol")

    def _put(
        self, wire: FileConnection, folder: CheckpointDir, file: str, count: int, completes: int | None
    ) -> Arrived | None:
        """Receive a file. `completes`: the shard whose .ok it is."""
        record = None
        try:
            begin(self.run, *position(folder.name))
            if completes is not None:
                self.expect(folder, completes)
            disk.write_file(folder.path, file, wire.chunks(count), reserve=count)
            if completes is not None:
                record = _checked(folder, completes)
        except MusterError as error:
            wire.refuse(error)
            raise OSError("the rest of the request cannot be read") from error
        wire.say({"bytes": count})
        return None if record is None else (folder, record)

    def _get(self, wire: FileConnection, folder: CheckpointDir, file: str, told: Mapping[str, Any]) -> None:
        at, most = told.get("at"), told["bytes"]
        if type(at) is not int or at < 0 or most > MOST_READ:
            raise OSError("the other end speaks another protocol")
        path = folder.path / file
        try:
            with disk.opened_folder(folder.path) as within:
                descriptor = disk.open_regular(within, file, path)
            with open(descriptor, "rb") as opened:  # noqa: PTH123
                count = max(0, min(most, os.fstat(descriptor).st_size - at))
                data = disk.pread(opened.fileno(), count, at, path)
        except (FileNotFoundError, MusterError):
            wire.refuse(f"{folder.name}: {file} is not here")
            return
        wire.say({"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        wire.socket.sendall(data)


def _checked(folder: CheckpointDir, writer: int) -> ShardRecord:
    """Return the record of a received shard, if it belongs to the shard; delete it if it does not."""
    path, record = folder.shard(writer), record_of(folder, writer)
    if record is None or not path.exists() or path.stat().st_size != record.bytes:
        folder.ok(writer).unlink(missing_ok=True)
        raise BadCheckpointError(f"{folder.name}: the record of shard {writer} is about another shard")
    return record
