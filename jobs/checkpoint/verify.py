"""Whether a checkpoint is what was saved: every size, every header, every byte."""

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint import disk, sealed
from muster.jobs.checkpoint.layout import read_header
from muster.jobs.checkpoint.manifest import Manifest, read_manifest
from muster.jobs.runfolder.checkpointdir import CheckpointDir

MAX_THREADS: Final = 8


def verify(folder: CheckpointDir, *, deep: bool = True) -> Manifest:
    """Check a committed checkpoint; `deep` reads every byte and compares its sha256 with the manifest's.

    Raises:
        FileNotFoundError: it was never committed.
        BadCheckpointError: something is not as it was saved; the message names the file.
        StorageError: it cannot be read.
    """
    manifest = read_manifest(folder)
    with disk.opened_folder(folder.path) as within:

        def check(writer: int) -> None:
            _check_shard(folder, within, manifest, writer, deep=deep)

        threads = min(MAX_THREADS, os.cpu_count() or 1, len(manifest.files))
        with ThreadPoolExecutor(threads) as pool:  # hashing leaves the interpreter's lock
            for _ in pool.map(check, range(len(manifest.files))):
                pass
    return manifest


def mark_verified(folder: CheckpointDir, manifest: Manifest) -> None:
    """Write VERIFIED.json: this manifest's files were read again and were right.

    Raises:
        StorageError, RunFolderError: it cannot be written.
    """
    body = {"manifest": manifest.sha256, "time": time.time()}
    disk.write_file(folder.path, folder.verified.name, [sealed.seal(body)])


def is_verified(folder: CheckpointDir, manifest: Manifest) -> bool:
    """Say whether a checkpoint is marked as verified; a damaged mark is none."""
    path = folder.verified
    try:
        with disk.opened_folder(folder.path) as within:
            body = sealed.unseal(disk.read_small(within, path.name, path, 1 << 16), path)
    except (FileNotFoundError, BadCheckpointError):
        return False
    return body.get("manifest") == manifest.sha256


def _check_shard(folder: CheckpointDir, within: int, manifest: Manifest, writer: int, *, deep: bool) -> None:
    wanted, path = manifest.files[writer], folder.shard(writer)
    try:
        descriptor = disk.open_regular(within, wanted.file, path)
    except FileNotFoundError as error:
        raise BadCheckpointError(f"{path}: missing") from error
    try:
        size = os.fstat(descriptor).st_size
        if size != wanted.bytes:
            raise BadCheckpointError(f"{path}: {size} bytes, saved were {wanted.bytes}")
        if deep:
            digest = hashlib.sha256()
            for chunk in disk.chunks_of(descriptor, size, path):
                digest.update(chunk)
            if digest.hexdigest() != wanted.sha256:
                raise BadCheckpointError(f"{path}: its sha256 is not the saved one: a bit or more has changed")
        _check_header(manifest, writer, descriptor, size, path)
    finally:
        os.close(descriptor)


def _check_header(manifest: Manifest, writer: int, descriptor: int, size: int, where: object) -> None:
    """Check that a shard says of itself what the manifest says of it."""
    header = read_header(descriptor, size, where)
    for key, wanted in (("step", manifest.step), ("attempt", manifest.attempt)):
        if header.metadata.get(key) != str(wanted):
            found = header.metadata.get(key)
            raise BadCheckpointError(f"{where}: of {key} {found!r:.40}, wanted {wanted}: of another generation")
    parts = manifest.parts[writer]
    wanted_tensors = {each.piece.key: (each.piece.dtype, each.piece.extent, each.offset, each.end) for each in parts}
    if header.tensors != wanted_tensors or len(wanted_tensors) != len(parts):
        raise BadCheckpointError(f"{where}: its header does not hold the tensors that the manifest names")
