"""Read a checkpoint whose shards are in the memory of several nodes: every rank gets only what it reads.

    one node     collects the .ok of every shard ─► MANIFEST.json ──► all other nodes, with the table of the shards
    every node   verifies the shards that it has
    rank ── "read" ─► its agent ── "read" ─► a node of the table, which sends the bytes and their SHA-256

Nothing is stored on the way, so a restart needs no more memory than before. The rank's end is `jobs/saving/memory.py`.
"""

import json
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster.jobs.basics.errors import MusterError, UnreachableError
from muster.jobs.basics.reading import parse_json
from muster.jobs.checkpoint.commit import begin, write_manifest
from muster.jobs.checkpoint.manifest import CheckpointManifest, manifest_of, parse_manifest
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.checkpoint.shard import ShardRecord
from muster.jobs.checkpoint.verify import verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.memory import LONGEST, READS
from muster.launch.node import copy_requests, copy_wire
from muster.launch.node.copy_wire import CopyConnection
from muster.launch.wire import messages as wire

STREAMS: Final = 4  # nodes that are asked at the same time
AGAIN_S: Final = 0.1  # before a busy node is asked again
PATIENCE_S: Final = 30.0  # less than a rank waits for its agent
MOST_OPEN: Final = 2  # connections to other nodes that are kept for the next read of a rank


@dataclass(frozen=True)
class ShardTable:
    """The nodes that have the shards of a checkpoint, for one attempt."""

    attempt: int
    name: str
    sources: tuple[wire.Source, ...]

    def of(self, writer: int) -> list[tuple[str, int]]:
        """Return the addresses of the nodes that have a shard."""
        return [(host, port) for host, port, runs in self.sources if any(low <= writer <= high for low, high in runs)]


class SpreadReads:
    """The reading of one checkpoint at a time, on one node."""

    def __init__(self, run: RunDir, secret: str, ended: threading.Event) -> None:
        self.run = run
        self.secret = secret
        self.table: ShardTable | None = None
        self._ended = ended

    # Before the ranks start -----------------------------------------------------------------------------------------

    def prepare(self, order: wire.Fetch, is_current: Callable[[], bool]) -> str:
        """Get the manifest, and verify the shards that are here; return the SHA-256 of the manifest.

        Raises:
            MusterError: if a shard is damaged, or a node cannot be reached.
        """
        if (found := step_and_attempt(order.name)) is None:
            raise UnreachableError(f"{order.name!r:.80} is not the name of a checkpoint")
        self.table, folder = None, begin(self.run, *found)
        if order.collects:
            manifest, sources = self._collect(folder, order), order.sources
        else:
            manifest, sources = self._index(folder, order, is_current)
        write_manifest(folder, manifest)
        self.table = ShardTable(order.attempt, order.name, sources)
        verify(folder, only=writers_in(folder))
        return manifest.sha256

    def only_here(self, folder: CheckpointDir) -> list[ShardRecord]:
        """List the shards that no other node has, because a node was lost."""
        if self.table is None or self.table.name != folder.name:
            return []
        found = (copy_requests.record_of(folder, each) for each in writers_in(folder) if len(self.table.of(each)) < 2)
        return [record for record in found if record is not None]

    def _collect(self, folder: CheckpointDir, order: wire.Fetch) -> CheckpointManifest:
        missing, work = set(range(order.writers)) - set(writers_in(folder)), []
        for address, port, runs in order.sources:
            wanted = {writer for low, high in runs for writer in range(low, high + 1)} & missing
            missing -= wanted
            work += [(address, port, wanted)] if wanted else []
        if missing:
            raise UnreachableError(f"{folder.name}: no node has shard {min(missing)}")
        with tempfile.TemporaryDirectory(dir=self.run.path) as path, ThreadPoolExecutor(STREAMS) as pool:
            others = begin(RunDir(Path(path)), *(step_and_attempt(folder.name) or (0, 0)))

            def ask(source: tuple[str, int, set[int]]) -> None:
                with copy_wire.dialled(*source[:2], self.secret) as connection:
                    copy_requests.get_records(connection, others, source[2])

            for _ in pool.map(ask, work):
                pass
            records = []
            for writer in range(order.writers):
                record = copy_requests.record_of(folder, writer) or copy_requests.record_of(others, writer)
                if record is None:
                    raise UnreachableError(f"{folder.name}: no node has sent the record of shard {writer}")
                records.append(record)
            return manifest_of(folder, records)

    def _index(
        self, folder: CheckpointDir, order: wire.Fetch, is_current: Callable[[], bool]
    ) -> tuple[CheckpointManifest, tuple[wire.Source, ...]]:
        """Get the manifest and the table from the collecting node, which may be busy."""
        asked = {"do": "index", "name": order.name, "attempt": order.attempt}
        while is_current() and not self._ended.is_set():
            for address, port, _ in order.sources:
                with suppress(UnreachableError), copy_wire.dialled(address, port, self.secret) as connection:
                    table, manifest = copy_requests.get_index(connection, asked)
                    sources = tuple((host, at, tuple(map(tuple, runs))) for host, at, runs in json.loads(table))
                    return parse_manifest(folder, manifest), sources
            self._ended.wait(AGAIN_S * (1 + random.random()))
        raise UnreachableError(f"{order.name}: is not wanted any more")

    def index(self, asked: Mapping[str, Any]) -> tuple[bytes, bytes] | None:
        """Return the table and the manifest for another node; None if they are not ready."""
        table = self.table
        if table is None or (table.attempt, table.name) != (asked.get("attempt"), asked.get("name")):
            return None
        folder = CheckpointDir(self.run.checkpoints / table.name)
        return json.dumps(table.sources).encode(), folder.manifest.read_bytes()

    # While they read ------------------------------------------------------------------------------------------------

    def listen(self) -> socket.socket:
        """Open the socket at which ranks of this node ask for shards."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.run.path / READS))  # in a folder of mode 0700
        listener.listen(128)
        return listener

    def serve(self, rank: socket.socket) -> None:
        """Answer one rank until it closes the connection."""
        with rank, suppress(OSError, ValueError, KeyError), rank.makefile("rb") as reader, Links(self.secret) as links:
            while line := reader.readline(LONGEST):
                rank.sendall(self._read(parse_json(line), links))

    def _read(self, asked: Mapping[str, Any], links: "Links") -> bytes:
        """Return the answer of a node that has a shard, or why there is none."""
        table, until = self.table, time.monotonic() + PATIENCE_S
        why = f"no node has shard {asked.get('writer')} of {asked.get('name')}"
        sources = [] if table is None or table.name != asked.get("name") else table.of(int(asked["writer"]))
        while sources and time.monotonic() < until and not self._ended.wait(0.0):
            for source in random.sample(sources, len(sources)):
                try:
                    return links.read(source, asked)
                except (MusterError, OSError) as error:
                    why = str(error)
            self._ended.wait(AGAIN_S)
        return json.dumps({"why": why[: LONGEST // 2]}).encode() + b"\n"


class Links:
    """A context manager with the connections to other nodes over which one rank reads."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self._open: dict[tuple[str, int], tuple[ExitStack, CopyConnection]] = {}

    def __enter__(self) -> "Links":
        return self

    def __exit__(self, *_: object) -> None:
        for source in [*self._open]:
            self._close(source)

    def read(self, source: tuple[str, int], asked: Mapping[str, Any]) -> bytes:
        """Return the answer of a node.

        Raises:
            OSError, MusterError: if it does not answer, or does not have the shard.
        """
        if source not in self._open:
            for oldest in [*self._open][: len(self._open) - MOST_OPEN + 1]:
                self._close(oldest)
            with ExitStack() as stack:
                connection = stack.enter_context(copy_wire.dialled(*source, self.secret))
                self._open[source] = stack.pop_all(), connection
        try:
            return copy_requests.get_range(self._open[source][1], asked)
        except (MusterError, OSError):
            self._close(source)
            raise

    def _close(self, source: tuple[str, int]) -> None:
        self._open.pop(source)[0].close()


def writers_in(folder: CheckpointDir) -> list[int]:
    """List the shards that are complete in a folder."""
    names: Iterable[str] = (path.stem.removeprefix("shard-") for path in folder.path.glob("shard-*.ok"))
    return sorted(int(name) for name in names if name.isdecimal())
