"""Commit a checkpoint: wait for every writer's `.ok`, check that no newer attempt has begun, then rename one file.

No collective or process group is needed, because each writer's `.ok` file shows that its shard is complete. The writer
of rank 0 commits. If it dies after the last `.ok`, the supervisor commits instead (`roll_forward`). Both write the same
bytes.
"""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from muster.jobs.basics import exits
from muster.jobs.basics.errors import BadCheckpointError, MusterError, RunFolderError
from muster.jobs.basics.files import make_folder
from muster.jobs.checkpoint import disk, sealed
from muster.jobs.checkpoint.lineage import candidates
from muster.jobs.checkpoint.manifest import CheckpointManifest, manifest_of, parse_manifest
from muster.jobs.checkpoint.names import identity
from muster.jobs.checkpoint.shard import ShardRecord, read_ok
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir

POLL_S: Final = 0.01
MAX_POLL_S: Final = 0.25
DEADLINE_S: Final = 600.0


class FencedError(MusterError):
    """A newer attempt has begun, so checkpoints of this attempt no longer count."""

    exit_code = exits.INFRASTRUCTURE


class IncompleteError(MusterError):
    """A writer did not finish its shard in time."""

    exit_code = exits.INFRASTRUCTURE


def begin(run: RunDir, step: int, attempt: int) -> CheckpointDir:
    """Create the folder of a checkpoint. Another writer may have created it already.

    Raises:
        FencedError: if a newer attempt has begun.
        StorageError, RunFolderError: if the folder cannot be created.
    """
    check_fence(run, attempt)
    folder = run.checkpoint(step, attempt)
    with disk.writing(folder.path):
        if _make(run.checkpoints):
            disk.sync_folder(run.path)
        if _make(folder.path):
            disk.sync_folder(run.checkpoints)
    return folder


def check_fence(run: RunDir, attempt: int) -> None:
    """Check that no newer attempt has begun.

    Raises:
        FencedError: if a newer attempt has begun.
        StorageError: if the run folder cannot be read.
    """
    try:
        newest = max(run.attempt_numbers(), default=attempt)
    except OSError as error:
        raise disk.read_error(run.path, error) from error
    if newest > attempt:
        raise FencedError(f"{run.path}: attempt {newest} has begun; attempt {attempt} can no longer commit")


def commit(
    run: RunDir, folder: CheckpointDir, writers: int, *, deadline_s: float = DEADLINE_S, poll_s: float = POLL_S
) -> CheckpointManifest:
    """Wait for every writer's `.ok`, then commit.

    Raises:
        FencedError: if a newer attempt has begun.
        IncompleteError: if a writer has not finished at the deadline.
        BadCheckpointError: if the shards do not match their `.ok` files, or do not form a checkpoint.
        StorageError, RunFolderError: if the commit cannot be written.
    """
    _, attempt = identity(folder)
    check_fence(run, attempt)
    records = _wait(folder, writers, deadline_s, poll_s)
    manifest = manifest_of(folder, records)
    check_fence(run, attempt)
    write_manifest(folder, manifest)
    disk.sync_folder(run.checkpoints)
    check_fence(run, attempt)  # fail if a newer attempt began meanwhile, without this checkpoint
    return manifest


def roll_forward(run: RunDir, *, say: disk.Say = lambda _: None) -> list[str]:
    """Commit the checkpoints of the lineage that lack only the manifest; return their names.

    If the original committer is still alive, it writes the same bytes, and both succeed. Checkpoints that cannot be
    committed are reported and left as they are.

    Raises:
        StorageError, RunFolderError: if the commit cannot be written.
    """
    done = []
    for folder in candidates(run, say=say):
        try:
            if not _is_pending(folder):
                continue
            first = _collect(folder, range(1))
            writers = first[0].writers
            records = first | _collect(folder, range(1, writers), writers)
            if len(records) < writers:
                continue
            manifest = manifest_of(folder, [records[writer] for writer in range(writers)])
        except FileNotFoundError:
            continue  # the folder was moved away meanwhile
        except BadCheckpointError as error:
            say(f"{folder.name} is not committed: {error}")
            continue
        write_manifest(folder, manifest)
        disk.sync_folder(run.checkpoints)
        say(f"{folder.name} was saved by all {len(manifest.files)} writers but not committed; it is now committed")
        done.append(folder.name)
    return done


def abandon(folder: CheckpointDir) -> None:
    """Delete a checkpoint that will not be committed, to free its disk space. A committed checkpoint is kept.

    The writer of rank 0 calls this when a writer could not finish. The others then fail, because their folder is gone.

    Raises:
        StorageError, RunFolderError: if the folder cannot be moved or deleted.
    """
    with disk.writing(folder.path), contextlib.suppress(FileNotFoundError):
        if disk.is_there(folder.path, folder.manifest.name):
            return
        folder.path.rename(folder.trash)
        disk.sync_folder(folder.path.parent)
        shutil.rmtree(folder.trash)


def _wait(folder: CheckpointDir, writers: int, deadline_s: float, poll_s: float) -> list[ShardRecord]:
    """Wait until all writers are done. Poll at growing intervals, because each poll goes to the storage server."""
    end_s = time.monotonic() + deadline_s
    records: dict[int, ShardRecord] = {}
    while True:
        missing = [writer for writer in range(writers) if writer not in records]
        try:
            records |= _collect(folder, missing, writers)
        except FileNotFoundError as error:
            raise RunFolderError(f"{folder.path}: is gone; this checkpoint was not committed") from error
        if len(records) == writers:
            return [records[writer] for writer in range(writers)]
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            missing = [writer for writer in missing if writer not in records]
            some = ", ".join(map(str, missing[:8])) + ("..." if len(missing) > 8 else "")
            raise IncompleteError(
                f"{folder.path}: no .ok of writers {some} after {deadline_s:.1f} s; it was not committed"
            )
        time.sleep(min(poll_s, left_s))
        poll_s = min(poll_s * 1.2, max(MAX_POLL_S, poll_s))


def _collect(folder: CheckpointDir, wanted: Iterable[int], writers: int | None = None) -> dict[int, ShardRecord]:
    """Read the `.ok` files that exist, and check that their shards have the recorded sizes."""
    records = {}
    with disk.opened_folder(folder.path) as within:
        names = disk.names_in(within, folder.path)
        for writer in wanted:
            if folder.ok(writer).name not in names:
                continue
            record = read_ok(folder, within, writer)
            if writers is not None and record.writers != writers:
                raise BadCheckpointError(f"{folder.ok(writer)}: lists {record.writers} writers, expected {writers}")
            _check_size(folder, within, record)
            records[writer] = record
    return records


def _check_size(folder: CheckpointDir, within: int, record: ShardRecord) -> None:
    path = folder.shard(record.writer)
    try:
        descriptor = disk.open_regular(within, path.name, path)
    except FileNotFoundError as error:
        raise BadCheckpointError(f"{path}: missing, although its .ok exists") from error
    try:
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size != record.bytes:
        raise BadCheckpointError(f"{path}: {size} bytes, but its .ok records {record.bytes}")


def _is_pending(folder: CheckpointDir) -> bool:
    with disk.opened_folder(folder.path) as within:
        names = disk.names_in(within, folder.path)
    return folder.ok(0).name in names and folder.manifest.name not in names


def write_manifest(folder: CheckpointDir, manifest: CheckpointManifest) -> None:
    """Write the manifest.

    Raises:
        BadCheckpointError: if the folder has a manifest with other contents.
        StorageError, RunFolderError: if it cannot be written.
    """
    name = folder.manifest.name
    with disk.writing(folder.path):
        there = disk.is_there(folder.path, name)
    if there:
        with disk.opened_folder(folder.path) as within:
            found = disk.read_small(within, name, folder.manifest, sealed.MAX_BYTES)
        if parse_manifest(folder, found).sha256 != manifest.sha256:
            raise BadCheckpointError(f"{folder.manifest}: already committed, with different contents")
        return
    disk.write_file(folder.path, name, [manifest.encoded])


def _make(path: Path) -> bool:
    """Create a folder; return True if it did not exist. Raise an error if a link is in its place."""
    try:
        make_folder(path)
        return True
    except FileExistsError:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise RunFolderError(f"{path}: is not a folder, or is a link to one; move it away") from None
        return False
