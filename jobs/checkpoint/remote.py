"""Read files of a checkpoint in the memory of other nodes: the requests, and the rank's end.

    {"do": "get", "name": "step-00000010.a000", "file": "shard-00007.safetensors", "at": 4096, "bytes": n}   ────►
                                           {"bytes": n, "sha256": "..."} and n bytes, or {"why": "..."}  ◄────

The agent of a node (`launch/node/copy_requests.py`) answers with at most the number of bytes asked for. Both ends prove
that they hold the same key (`jobs/basics/handshake.py`): the run's secret for copies, which only agents have, or the
key of READER, which lets ranks read. A rank finds this key in the folder in its node's memory, and the nodes that have
each shard in a table beside the manifest.
"""

import hashlib
import json
import random
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Final

from muster.jobs.basics import handshake
from muster.jobs.basics.errors import MusterError, UnreachableError
from muster.jobs.basics.handshake import WELCOME, AgentSide, HandshakeError
from muster.jobs.basics.reading import parse_json
from muster.jobs.checkpoint import sealed
from muster.jobs.runfolder.checkpointdir import CheckpointDir

KEY: Final = "key"  # the file with the key of READER, in the folder in memory
READER: Final = 1  # the number of the node whose key ranks have, instead of 0 for agents
CONNECT_S: Final = 3.0
QUIET_S: Final = 10.0  # without a byte, after which the other end is considered lost
AGAIN_S: Final = 0.1  # before a busy node is asked again
PATIENCE_S: Final = 30.0  # for one range
LONGEST: Final = 1 << 12  # bytes of a line
LONGEST_WHY: Final = 1 << 9  # characters, of at most 6 bytes
CHUNK_BYTES: Final = 1 << 18
MOST_READ: Final = sealed.MAX_BYTES  # of one request

Where = tuple[str, int]  # address and port of a node
Source = tuple[str, int, Sequence[tuple[int, int]]]  # of a node, with its shards as (first, last) of consecutive ranks


@dataclass
class FileConnection:
    """One end of a connection that carries requests and files. `may_put`: the other end may send files, too."""

    socket: socket.socket
    reader: BinaryIO
    may_put: bool = False

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Receive a message.

        Raises:
            OSError: if it is not a valid one, or the connection has ended.
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

    def answer(self) -> dict[str, Any]:
        """Receive the answer to a request.

        Raises:
            OSError: as for `hear`.
            UnreachableError: if the other end refuses; the text is its reason.
        """
        told = self.hear()
        if "why" in told:
            raise UnreachableError(str(told["why"])[:LONGEST_WHY])
        return told

    def refuse(self, why: object) -> None:
        """Answer a request with the reason why it is refused."""
        self.say({"why": str(why)[:LONGEST_WHY]})

    def ask(self, asked: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Send a request of `get`; return the answer and the bytes. Raise the errors of `answer` and `chunks`."""
        self.say(asked)
        told = self.answer()
        count = told.get("bytes")
        if type(count) is not int or not 0 <= count <= MOST_READ:
            raise OSError("the other end speaks another protocol")
        return told, b"".join(self.chunks(count))


def get(name: str, file: str, at: int = 0, count: int = MOST_READ) -> dict[str, Any]:
    """Return the request for a range of a checkpoint's file."""
    return {"do": "get", "name": name, "file": file, "at": at, "bytes": count}


@contextmanager
def dialled(address: str, port: int, key: str, node: int = 0) -> Iterator[FileConnection]:
    """Connect to the memory of another node. `node`: the number that `key` belongs to; 0: the secret itself.

    Raises:
        UnreachableError: if the node cannot be reached, does not hold the key, or is lost within this context.
    """
    where = f"{address}:{port}"
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection, connection.makefile("rb") as reader:
            connection.settimeout(QUIET_S)
            end = AgentSide(key, node, where)
            connection.sendall(end.greeting())
            connection.sendall(end.answer(reader.readline(handshake.LONGEST)))
            if reader.readline(handshake.LONGEST) != WELCOME:
                raise HandshakeError("refuses this node")
            yield FileConnection(connection, reader)
    except (OSError, HandshakeError) as error:
        raise UnreachableError(f"the node at {where}: {error or type(error).__name__}") from error


class NodesMemory:
    """The shards of a checkpoint in the memory of other nodes. Its connection is kept for the next range."""

    def __init__(self, folder: CheckpointDir) -> None:
        self._folder = folder
        self._where: Where | None = None
        self._connection: FileConnection | None = None
        self._stack = ExitStack()

    @cached_property
    def _key(self) -> str:
        return (self._folder.path.parent.parent / KEY).read_text()

    @cached_property
    def _sources(self) -> Sequence[Source]:
        newest = max(self._folder.path.glob("nodes-*.json"))
        return json.loads(newest.read_bytes())  # type: ignore[no-any-return]

    def read(self, writer: int, at: int, count: int) -> bytes:
        """Return `count` bytes of a shard.

        Raises:
            UnreachableError: if no node has sent them.
        """
        name, asked = self._folder.name, get(self._folder.name, self._folder.shard(writer).name, at, count)
        holders, why, until = holders_of(self._sources, writer), "no node has it", time.monotonic() + PATIENCE_S
        while holders and time.monotonic() < until:
            for where in sorted(random.sample(holders, len(holders)), key=lambda each: each != self._where):
                try:
                    told, data = self._ask(where, asked)
                except (OSError, MusterError) as error:
                    self.close()
                    why = str(error)
                    continue
                if len(data) == count and hashlib.sha256(data).hexdigest() == told.get("sha256"):
                    return data
                why = "it has changed on its way"
            time.sleep(AGAIN_S)
        raise UnreachableError(f"{name}: no node has sent shard {writer}: {why}")

    def _ask(self, where: Where, asked: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        if self._connection is None or where != self._where:
            self.close()
            self._connection = self._stack.enter_context(dialled(*where, self._key, READER))
            self._where = where
        return self._connection.ask(asked)

    def close(self) -> None:
        """Close the connection."""
        self._stack.close()
        self._connection = self._where = None


def holders_of(sources: Iterable[Source], writer: int) -> list[Where]:
    """Return the addresses of the nodes that have a shard."""
    return [(host, port) for host, port, runs in sources if any(low <= writer <= high for low, high in runs)]
