"""The requests of one node's memory to that of another, over a connection of `launch/node/copy_wire.py`.

    dialler                                               listener
      {"do": "put", "name": …, "writer": 2,
       "bytes": b, "sha256": …, "ok": n}           ────→
                                                   ←────  {"is": "wanted"}, or "kept": it has this shard already
      n bytes of the .ok, b bytes of the shard     ────→
                                                   ←────  {"is": "kept"}, or {"why": …}

      {"do": "records", "name": …}                 ────→
                                                   ←────  {"name": …, "writer": 2, "ok": n} and n bytes for each .ok
                                                   ←────  {"is": "end"}

      {"do": "index", "name": …, "attempt": 1}     ────→
                                                   ←────  {"table": t, "manifest": m}, then both

      {"do": "read", "name": …, "writer": 2,
       "at": offset, "bytes": b}                   ────→
                                                   ←────  {"bytes": b, "sha256": …}, then the bytes

The SHA-256 of a shard is computed once when it is written, and compared before a restart reads it: doing so for every
copy, too, would slow the ranks. Instead of the last three answers, {"why": …} refuses. Any number of requests may
follow each other.
"""

import hashlib
import json
import socket
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics.errors import BadCheckpointError, MusterError, UnreachableError
from muster.jobs.checkpoint import disk, sealed
from muster.jobs.checkpoint.commit import begin
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.checkpoint.shard import ShardRecord, read_ok
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.node.copy_wire import CHUNK_BYTES, CopyConnection
from muster.launch.wire.handshake import LONGEST

MOST_READ: Final = 1 << 26  # bytes of one range
KEPT, WANTED = {"is": "kept"}, {"is": "wanted"}

Pace = Callable[[int], None]  # called before a number of bytes is sent
Arrived = tuple[CheckpointDir, ShardRecord]


def record_of(folder: CheckpointDir, writer: int) -> ShardRecord | None:
    """Return the record of a complete shard; None if there is none."""
    try:
        with disk.opened_folder(folder.path) as within:
            return read_ok(folder, within, writer)
    except (FileNotFoundError, MusterError):
        return None


def place_of(name: str, told: Mapping[str, Any]) -> int:
    """Return the shard that a message about the checkpoint `name` is about.

    Raises:
        OSError: if the message is invalid.
    """
    writer = told.get("writer")
    if told.get("name") != name or type(writer) is not int or writer < 0:
        raise OSError("the other end speaks another protocol")
    return writer


def put(wire: CopyConnection, folder: CheckpointDir, record: ShardRecord, pace: Pace) -> int:
    """Send a shard, unless the other node has it; return the number of bytes sent.

    Raises:
        OSError: if the connection is lost.
        UnreachableError: if the other node cannot keep it.
    """
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)  # so that messages of ranks wait little
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


def get_records(wire: CopyConnection, folder: CheckpointDir, wanted: Container[int]) -> None:
    """Receive the .ok files of `wanted` shards into a folder.

    Raises:
        OSError: if the connection is lost.
        MusterError: if they cannot be stored.
    """
    wire.say({"do": "records", "name": folder.name})
    while "writer" in (told := wire.hear()):
        writer, text = place_of(folder.name, told), b"".join(wire.chunks(size_in(told, "ok", sealed.MAX_BYTES)))
        if writer in wanted:
            disk.write_file(folder.path, folder.ok(writer).name, [text])


def get_index(wire: CopyConnection, asked: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Receive the table of the shards, and the manifest.

    Raises:
        OSError: if the connection is lost.
        UnreachableError: if the other node does not have them yet.
    """
    wire.say(asked)
    told = accepting(wire.hear())
    table, manifest = (b"".join(wire.chunks(size_in(told, name, sealed.MAX_BYTES))) for name in ("table", "manifest"))
    return table, manifest


def get_range(wire: CopyConnection, asked: Mapping[str, Any]) -> bytes:
    """Ask for a range of a shard; return the answer as it was sent.

    Raises:
        OSError: if the connection is lost.
        UnreachableError: if the other node does not have the shard.
    """
    wire.say(asked)
    told = accepting(wire.hear())
    data = b"".join(wire.chunks(size_in(told, "bytes", MOST_READ)))
    return json.dumps(told).encode() + b"\n" + data


def accepting(told: dict[str, Any]) -> dict[str, Any]:
    """Return an answer, unless it is a refusal.

    Raises:
        UnreachableError: if the other node refuses.
    """
    if "why" in told:
        raise UnreachableError(str(told["why"])[:LONGEST])
    return told


def size_in(told: Mapping[str, Any], name: str, most: int) -> int:
    """Return a size from a message.

    Raises:
        OSError: if it is not a size.
    """
    size = told.get(name)
    if type(size) is not int or not 0 < size <= most:
        raise OSError("the other end speaks another protocol")
    return size


@dataclass(frozen=True)
class Answering:
    """What a node needs to answer other nodes.

    `expect` is called before a received shard becomes visible. `index` returns the table of the shards and the
    manifest for a request, or None if they are not ready.
    """

    run: RunDir
    expect: Callable[[CheckpointDir, int], None]
    index: Callable[[Mapping[str, Any]], tuple[bytes, bytes] | None]

    def answer(self, wire: CopyConnection) -> Arrived | None:
        """Answer one request of another node; return the shard that it has put here, if any.

        Raises:
            OSError: if the connection is lost, or the request is invalid.
        """
        told = wire.hear()
        found = step_and_attempt(str(told.get("name")))
        does = {"put": self._put, "records": self._records, "index": self._index, "read": self._read}
        if found is None or told.get("do") not in does:
            raise OSError("the other end speaks another protocol")
        return does[str(told["do"])](wire, self.run.checkpoint(*found), told)

    def _put(self, wire: CopyConnection, folder: CheckpointDir, told: Mapping[str, Any]) -> Arrived | None:
        writer = place_of(folder.name, told)
        record = record_of(folder, writer)
        if record is not None and record.sha256 == told.get("sha256"):
            wire.say(KEPT)
            return folder, record
        self.expect(folder, writer)
        wire.say(WANTED)
        try:
            begin(self.run, *(step_and_attempt(folder.name) or (0, 0)))
            _receive(wire, folder, writer, told)
        except MusterError as error:
            wire.say({"why": str(error)[: LONGEST // 2]})
            return None
        wire.say(KEPT)
        record = record_of(folder, writer)
        return None if record is None else (folder, record)

    def _records(self, wire: CopyConnection, folder: CheckpointDir, told: Mapping[str, Any]) -> None:
        for path in sorted(folder.path.glob("shard-*.ok")):
            text = path.read_bytes()
            writer = int(path.stem.removeprefix("shard-"))
            wire.say({"name": folder.name, "writer": writer, "ok": len(text)})
            wire.socket.sendall(text)
        wire.say({"is": "end"})

    def _index(self, wire: CopyConnection, folder: CheckpointDir, told: Mapping[str, Any]) -> None:
        found = self.index(told)
        if found is None:
            wire.say({"why": f"{folder.name} is not ready"})
            return
        table, manifest = found
        wire.say({"table": len(table), "manifest": len(manifest)})
        wire.socket.sendall(table + manifest)

    def _read(self, wire: CopyConnection, folder: CheckpointDir, told: Mapping[str, Any]) -> None:
        writer, count = place_of(folder.name, told), size_in(told, "bytes", MOST_READ)
        at = told.get("at")
        if type(at) is not int or at < 0:
            raise OSError("the other end speaks another protocol")
        try:
            with folder.ok(writer).open("rb"), folder.shard(writer).open("rb") as file:
                data = disk.pread(file.fileno(), count, at, file.name)
        except (FileNotFoundError, MusterError):
            wire.say({"why": f"{folder.name}: these bytes of its shard {writer} are not here"})
            return
        wire.say({"bytes": count, "sha256": hashlib.sha256(data).hexdigest()})
        wire.socket.sendall(data)


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
    text = b"".join(wire.chunks(ok))
    disk.write_file(folder.path, folder.shard(writer).name, wire.chunks(count), reserve=count)
    disk.write_file(folder.path, folder.ok(writer).name, [text])
    record = record_of(folder, writer)
    if record is None or (record.sha256, record.bytes) != (expected, count):
        folder.ok(writer).unlink(missing_ok=True)
        raise BadCheckpointError(f"{folder.name}: the record of shard {writer} is about another shard")
    return count
