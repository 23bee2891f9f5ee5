"""Verify that a checkpoint is unchanged since it was saved: every size, every header, every byte."""

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint import disk, sealed
from muster.jobs.checkpoint.layout import read_header
from muster.jobs.checkpoint.manifest import CheckpointManifest, read_manifest
from muster.jobs.runfolder.checkpointdir import CheckpointDir

MAX_THREADS: Final = 8


def verify(folder: CheckpointDir, *, deep: bool = True, only: Sequence[int] | None = None) -> CheckpointManifest:
    """Check a committed checkpoint; `deep` also reads every byte and compares the SHA-256 with the manifest's.

    `only`: check the shards of these writers (default: all).

    Raises:
        FileNotFoundError: if the checkpoint was never committed.
        BadCheckpointError: if a file changed since the save; the message names it.
        StorageError: if a file cannot be read.
    """
    manifest = read_manifest(folder)
    with disk.opened_folder(folder.path) as within:

        def check(writer: int) -> None:
            _check_shard(folder, within, manifest, writer, deep=deep)

        writers = range(len(manifest.files)) if only is None else only
        threads = max(min(MAX_THREADS, os.cpu_count() or 1, len(writers)), 1)
        with ThreadPoolExecutor(threads) as pool:  # hashing releases the GIL
            for _ in pool.map(check, writers):
                pass
    return manifest


def mark_verified(folder: CheckpointDir, manifest: CheckpointManifest) -> None:
    """Write VERIFIED.json, which records that all files of this manifest were read back and are correct.

    Raises:
        StorageError, RunFolderError: if VERIFIED.json cannot be written.
    """
    body = {"manifest": manifest.sha256, "time": time.time()}
    disk.write_file(folder.path, folder.verified.name, [sealed.seal(body)])


def is_verified(folder: CheckpointDir, manifest: CheckpointManifest) -> bool:
    """Return True if a checkpoint is marked as verified. A damaged VERIFIED.json does not count."""
    path = folder.verified
    try:
        with disk.opened_folder(folder.path) as within:
            body = sealed.unseal(disk.read_small(within, path.name, path, 1 << 16), path)
    except (FileNotFoundError, BadCheckpointError):
        return False
    return body.get("manifest") == manifest.sha256


def _check_shard(folder: CheckpointDir, within: int, manifest: CheckpointManifest, writer: int, *, deep: bool) -> None:
    wanted, path = manifest.files[writer], folder.shard(writer)
    try:
        descriptor = disk.open_regular(within, wanted.file, path)
    except FileNotFoundError as error:
        raise BadCheckpointError(f"{path}: missing") from error
    try:
        size = os.fstat(descriptor).st_size
        if size != wanted.bytes:
            raise BadCheckpointError(f"{path}: {size} bytes, but {wanted.bytes} were saved")
        if deep:
            digest = hashlib.sha256()
            for chunk in disk.chunks_of(descriptor, size, path):
                digest.update(chunk)
            if digest.hexdigest() != wanted.sha256:
                raise BadCheckpointError(f"{path}: damaged: its sha256 differs from the saved one")
        _check_header(manifest, writer, descriptor, size, path)
    finally:
        os.close(descriptor)


def _check_header(manifest: CheckpointManifest, writer: int, descriptor: int, size: int, where: object) -> None:
    """Check that the header of a shard agrees with the manifest."""
    header = read_header(descriptor, size, where)
    for key, wanted in (("step", manifest.step), ("attempt", manifest.attempt)):
        if header.metadata.get(key) != str(wanted):
            found = header.metadata.get(key)
            raise BadCheckpointError(
                f"{where}: {key} {found!r:.40}, expected {wanted}: the file is from another checkpoint"
            )
    parts = manifest.parts[writer]
    wanted_tensors = {each.piece.key: (each.piece.dtype, each.piece.extent, each.offset, each.end) for each in parts}
    if header.tensors != wanted_tensors or len(wanted_tensors) != len(parts):
        raise BadCheckpointError(f"{where}: its header does not match the tensors in the manifest")
