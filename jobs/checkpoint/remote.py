"""Read files of a checkpoint in the memory of other nodes: the requests, and the rank's end.

    {"do": "get", "name": "step-00000010.a000", "file": "shard-00007.safetensors", "at": 4096, "bytes": n}   ────►
                                           {"bytes": n, "sha256": "..."} and n bytes, or {"why": "..."}  ◄────

A rank sends its requests to its agent, over a Unix socket in the folder in memory. The agent passes them on to a node
that has the file (`launch/node/copy_reads.py`), which answers with at most the number of bytes asked for.
"""

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from muster.jobs.basics.errors import UnreachableError
from muster.jobs.basics.reading import parse_json
from muster.jobs.checkpoint import sealed
from muster.jobs.runfolder.checkpointdir import CheckpointDir

READS: Final = "reads"  # the socket at which an agent answers its ranks
ANSWER_S: Final = 60.0  # the agent itself asks other nodes for less time
LONGEST: Final = 1 << 12  # bytes of a line
LONGEST_WHY: Final = 1 << 10  # characters; each may need several bytes
CHUNK_BYTES: Final = 1 << 18
MOST_READ: Final = sealed.MAX_BYTES  # of one request


@dataclass
class FileConnection:
    """One end of a connection that carries requests and files."""

    socket: socket.socket
    reader: BinaryIO

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
        """Send a "get", and return the answer and the bytes; errors as for `answer` and `chunks`."""
        self.say(asked)
        told = self.answer()
        count = told.get("bytes")
        if type(count) is not int or not 0 <= count <= MOST_READ:
            raise OSError("the other end speaks another protocol")
        return told, b"".join(self.chunks(count))


def get(name: str, file: str, at: int = 0, count: int = MOST_READ) -> dict[str, Any]:
    """Return the request for a range of a checkpoint's file."""
    return {"do": "get", "name": name, "file": file, "at": at, "bytes": count}


class NodesMemory:
    """The shards of a checkpoint in the memory of other nodes, read through this node's agent."""

    def __init__(self, folder: CheckpointDir) -> None:
        self._folder = folder
        self._connection: FileConnection | None = None

    def read(self, writer: int, at: int, count: int) -> bytes:
        """Return `count` bytes of a shard.

        Raises:
            UnreachableError: if no node has sent them.
        """
        name, file = self._folder.name, self._folder.shard(writer).name
        try:
            if self._connection is None:
                self._connection = self._connect()
            told, data = self._connection.ask(get(name, file, at, count))
        except (OSError, UnreachableError) as error:
            self.close()
            raise UnreachableError(f"{name}: no node has sent shard {writer}: {error}") from error
        if len(data) != count or hashlib.sha256(data).hexdigest() != told.get("sha256"):
            raise UnreachableError(f"{name}: no node has sent shard {writer}: it has changed on its way")
        return data

    def _connect(self) -> FileConnection:
        agent = socket.socket(socket.AF_UNIX)
        agent.settimeout(ANSWER_S)
        try:
            agent.connect(str(self._folder.path.parent.parent / READS))
        except OSError:
            agent.close()
            raise
        return FileConnection(agent, agent.makefile("rb"))

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.reader.close()
            self._connection.socket.close()
            self._connection = None
