"""Read a checkpoint whose shards are in the memory of several nodes: every rank gets only what it reads.

    one node     collects the .ok of every shard ─► MANIFEST.json, table of the shards ──► all other nodes
    every node   verifies the shards that it has
    rank ── "get" ─► its agent ── "get" ─► a node of the table, which sends the bytes and their SHA-256

Nothing is stored on the way, so a restart needs no more memory than before. The rank's end is
`jobs/checkpoint/remote.py`.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any, Final

from muster.jobs.basics.errors import MusterError, UnreachableError
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.commit import begin, write_manifest
from muster.jobs.checkpoint.manifest import CheckpointManifest, manifest_of, parse_manifest
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.checkpoint.remote import READS, FileConnection, get
from muster.jobs.checkpoint.shard import ShardRecord, parse_ok
from muster.jobs.checkpoint.verify import verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.node import copy_wire
from muster.launch.node.copy_requests import SHARD, record_of, writers_in
from muster.launch.wire import messages as wire

STREAMS: Final = 4  # nodes that are asked at the same time
AGAIN_S: Final = 0.1  # before a busy node is asked again
PATIENCE_S: Final = 30.0  # less than a rank waits for its agent

Where = tuple[str, int]


class SpreadReads:
    """The reading of one checkpoint at a time, on one node."""

    def __init__(self, run: RunDir, secret: str, ended: threading.Event) -> None:
        self.run = run
        self.secret = secret
        self._ended = ended
        self._name = ""  # of the checkpoint
        self._sources: Sequence[wire.Source] = ()  # the nodes that have its shards

    # Before the ranks start -----------------------------------------------------------------------------------------

    def prepare(self, order: wire.Fetch, is_current: Callable[[], bool]) -> str:
        """Get the manifest, and verify the shards that are here; return the SHA-256 of the manifest.

        Raises:
            MusterError: if a shard is damaged, or a node cannot be reached.
        """
        if (found := step_and_attempt(order.name)) is None:
            raise UnreachableError(f"{order.name!r:.80} is not the name of a checkpoint")
        self._name, folder = "", begin(self.run, *found)
        if order.collects:
            sources, manifest = order.sources, self._collect(folder, order)
        else:
            sources, manifest = self._from_collector(folder, order, is_current)
        write_manifest(folder, manifest)
        if order.collects:  # from now on other nodes get both here
            table = folder.nodes(order.attempt).name
            disk.write_file(folder.path, table, [json.dumps(sources).encode()])
        self._name, self._sources = order.name, sources
        verify(folder, only=writers_in(folder))
        return manifest.sha256

    def only_here(self, folder: CheckpointDir) -> list[ShardRecord]:
        """List the shards that no other node has, because a node was lost."""
        if self._name != folder.name:
            return []
        found = (record_of(folder, writer) for writer in writers_in(folder) if len(self._holders(writer)) < 2)
        return [record for record in found if record is not None]

    def _holders(self, writer: int) -> list[Where]:
        """Return the addresses of the nodes that have a shard."""
        return [(host, port) for host, port, runs in self._sources if any(low <= writer <= high for low, high in runs)]

    def _collect(self, folder: CheckpointDir, order: wire.Fetch) -> CheckpointManifest:
        """Build the manifest from the records of all shards.

        Raises:
            MusterError: if a record is damaged, or no node sends it.
        """
        records = {writer: record_of(folder, writer) for writer in writers_in(folder)}
        missing, work = set(range(order.writers)) - records.keys(), list[tuple[Where, set[int]]]()
        for address, port, runs in order.sources:
            wanted = {writer for low, high in runs for writer in range(low, high + 1)} & missing
            missing -= wanted
            work += [((address, port), wanted)] if wanted else []

        def ask(source: tuple[Where, set[int]]) -> None:
            (address, port), writers = source
            with copy_wire.dialled(address, port, self.secret) as connection:
                for writer in writers:
                    _, data = connection.ask(get(folder.name, folder.ok(writer).name))
                    records[writer] = parse_ok(folder, writer, data)

        with ThreadPoolExecutor(STREAMS) as pool:
            for _ in pool.map(ask, work):
                pass
        found = [record for writer in range(order.writers) if (record := records.get(writer)) is not None]
        if len(found) < order.writers:
            raise UnreachableError(f"{folder.name}: no node has some of its {order.writers} shards")
        return manifest_of(folder, found)

    def _from_collector(
        self, folder: CheckpointDir, order: wire.Fetch, is_current: Callable[[], bool]
    ) -> tuple[Sequence[wire.Source], CheckpointManifest]:
        """Get the table and the manifest from the collecting node, which may be busy."""
        while is_current() and not self._ended.is_set():
            for address, port, _ in order.sources:
                with suppress(UnreachableError), copy_wire.dialled(address, port, self.secret) as connection:
                    _, table = connection.ask(get(order.name, folder.nodes(order.attempt).name))
                    _, manifest = connection.ask(get(order.name, folder.manifest.name))
                    return json.loads(table), parse_manifest(folder, manifest)
            self._ended.wait(AGAIN_S * (1 + random.random()))
        raise UnreachableError(f"{order.name}: is not wanted any more")

    # While they read ------------------------------------------------------------------------------------------------

    def listen(self) -> socket.socket:
        """Open the socket at which ranks of this node ask for shards."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.run.path / READS))  # in a folder of mode 0700
        listener.listen(128)
        return listener

    def serve(self, rank: socket.socket) -> None:
        """Answer one rank until it closes the connection."""
        with rank, suppress(OSError), rank.makefile("rb") as reader, closing(Link(self.secret)) as link:
            connection = FileConnection(rank, reader)
            while True:
                try:
                    told, data = self._pass_on(connection.hear(), link)
                except UnreachableError as error:
                    connection.refuse(error)
                else:
                    connection.say(told)
                    rank.sendall(data)

    def _pass_on(self, asked: Mapping[str, Any], link: "Link") -> tuple[dict[str, Any], bytes]:
        """Return the answer of a node that has the shard that a rank asks for.

        Raises:
            UnreachableError: if there is none.
        """
        shard, until = SHARD.fullmatch(str(asked.get("file"))), time.monotonic() + PATIENCE_S
        why = f"no node has {asked.get('file')} of {asked.get('name')}"
        holders = self._holders(int(shard[1])) if shard is not None and asked.get("name") == self._name else []
        while holders and time.monotonic() < until and not self._ended.wait(0.0):
            for where in sorted(random.sample(holders, len(holders)), key=lambda each: each != link.where):
                try:
                    return link.ask(where, asked)
                except UnreachableError as error:
                    why = str(error)
            self._ended.wait(AGAIN_S)
        raise UnreachableError(why)


class Link:
    """The connection to the node that a rank reads from. It is kept for the next request."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.where: Where | None = None
        self._connection: FileConnection | None = None
        self._stack = ExitStack()

    def ask(self, where: Where, asked: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer of a node, and the bytes.

        Raises:
            UnreachableError: if it does not answer, or does not have the shard.
        """
        if self._connection is None or where != self.where:
            self.close()
            self._connection = self._stack.enter_context(copy_wire.dialled(*where, self.secret))
            self.where = where
        try:
            return self._connection.ask(asked)
        except (OSError, MusterError) as error:
            self.close()
            raise UnreachableError(f"the node at {where[0]}:{where[1]}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._stack.close()
        self._connection = self.where = None
