"""Prepare the reading of a checkpoint whose shards are in the memory of several nodes.

    one node     collects the .ok of every shard ─► MANIFEST.json, table of the shards ──► all other nodes
    every node   verifies the shards that it has
    rank ── "get" ─► a node of the table, whose agent sends the bytes and their SHA-256

Nothing is stored on the way, so a restart needs no more memory than before. The rank's end is
`jobs/checkpoint/remote.py`.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from muster.jobs.basics.errors import UnreachableError
from muster.jobs.checkpoint import disk
from muster.jobs.checkpoint.commit import begin, write_manifest
from muster.jobs.checkpoint.manifest import CheckpointManifest, manifest_of, parse_manifest
from muster.jobs.checkpoint.names import step_and_attempt
from muster.jobs.checkpoint.remote import AGAIN_S, Source, Where, dialled, get, holders_of
from muster.jobs.checkpoint.shard import ShardRecord, parse_ok
from muster.jobs.checkpoint.verify import verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.node.copy_requests import record_of, writers_in
from muster.launch.wire import messages as wire

STREAMS: Final = 4  # nodes that are asked at the same time

Shards = list[tuple[CheckpointDir, ShardRecord]]


def prepare(run: RunDir, secret: str, order: wire.Fetch, is_wanted: Callable[[], bool]) -> tuple[str, Shards]:
    """Get the manifest, and verify the shards that are here.

    Return the SHA-256 of the manifest, and the shards that no other node has, because a node was lost.

    Raises:
        MusterError: if a shard is damaged, or a node cannot be reached.
    """
    if (found := step_and_attempt(order.name)) is None:
        raise UnreachableError(f"{order.name!r:.80} is not the name of a checkpoint")
    folder = begin(run, *found)
    sources: Sequence[Source] = order.sources
    if order.collects:
        manifest = _collect(folder, secret, order)
    else:
        sources, manifest = _from_collector(folder, secret, order, is_wanted)
    write_manifest(folder, manifest)  # first, because other nodes get both files once the second exists
    disk.write_file(folder.path, folder.nodes(order.attempt).name, [json.dumps(sources).encode()])
    writers = writers_in(folder)
    verify(folder, only=writers)
    alone = (record_of(folder, writer) for writer in writers if len(holders_of(sources, writer)) < 2)
    return manifest.sha256, [(folder, record) for record in alone if record is not None]


def _collect(folder: CheckpointDir, secret: str, order: wire.Fetch) -> CheckpointManifest:
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
        with dialled(address, port, secret) as connection:
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
    folder: CheckpointDir, secret: str, order: wire.Fetch, is_wanted: Callable[[], bool]
) -> tuple[Sequence[Source], CheckpointManifest]:
    """Get the table and the manifest from the collecting node, which may be busy."""
    while is_wanted():
        for address, port, _ in order.sources:
            with suppress(UnreachableError), dialled(address, port, secret) as connection:
                _, table = connection.ask(get(order.name, folder.nodes(order.attempt).name))
                _, manifest = connection.ask(get(order.name, folder.manifest.name))
                return json.loads(table), parse_manifest(folder, manifest)
        time.sleep(AGAIN_S * (1 + random.random()))
    raise UnreachableError(f"{order.name}: is not wanted any more")
