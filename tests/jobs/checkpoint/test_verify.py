"""Every kind of damage to a checkpoint is found before it is loaded, and nothing outside it is touched."""

import os
import random
import shutil
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.jobs.basics.errors import BadCheckpointError, StorageError
from muster.jobs.checkpoint import verify as verify_module
from muster.jobs.checkpoint.verify import is_verified, mark_verified, verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from support.checkpoints import damage

once = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def of(folder: CheckpointDir) -> list[Path]:
    """List the files that a load depends on."""
    return [folder.shard(0), folder.shard(1), folder.manifest]


def test_what_was_saved_is_good(saved) -> None:
    folder = saved.save(5)
    assert saved.holds(folder, verify(folder))
    assert verify(folder, deep=False) == verify(folder)


def test_what_was_never_committed_is_no_checkpoint(saved) -> None:
    with pytest.raises(FileNotFoundError):
        verify(saved.write(5))
    with pytest.raises(FileNotFoundError):
        verify(saved.run.checkpoint(6, 0))


@once
@given(which=st.integers(0, 2), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_changed_bit_anywhere_is_found(saved, which: int, at: float, bit: int) -> None:
    folder = saved.run.checkpoint(5, 0)
    if not folder.path.exists():
        saved.save(5)
    path = of(folder)[which]
    data = path.read_bytes()
    place = int(at * len(data))
    path.write_bytes(data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :])
    with pytest.raises(BadCheckpointError, match=path.name):
        verify(folder)
    path.write_bytes(data)
    verify(folder)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("change", ["empty", "short", "long", "hole", "zeros behind"])
def test_lengths_and_holes_are_found(saved, which: int, change: str) -> None:
    folder = saved.save(5)
    path = of(folder)[which]
    data = path.read_bytes()
    draw = random.Random(which)
    if change == "empty":
        data = b""
    elif change == "short":
        data = data[: draw.randrange(1, len(data))]
    elif change == "long":
        data += b"x"
    elif change == "hole":
        place = draw.randrange(len(data) - 16)
        data = data[:place] + bytes(16) + data[place + 16 :]
    else:
        data = data[: len(data) // 2].ljust(len(data), b"\0")
    path.write_bytes(data)
    with pytest.raises(BadCheckpointError, match=path.name):
        verify(folder)


@pytest.mark.parametrize("which", [[0], [1], [0, 1], [2], [0, 1, 2]])
def test_files_of_another_generation_are_found(saved, which: list[int]) -> None:
    old, new = saved.save(5), saved.save(6)
    for each in which:
        shutil.copy(of(old)[each], of(new)[each])
    with pytest.raises(BadCheckpointError):
        verify(new)
    assert saved.holds(old, verify(old))


def test_a_shard_of_the_other_writer_or_none_is_found(saved) -> None:
    folder = saved.save(5)
    data = folder.shard(1).read_bytes()
    shutil.copy(folder.shard(0), folder.shard(1))
    with pytest.raises(BadCheckpointError):
        verify(folder)
    folder.shard(1).unlink()
    with pytest.raises(BadCheckpointError, match="missing"):
        verify(folder, deep=False)
    folder.shard(1).write_bytes(data)
    verify(folder)


def test_without_reading_every_byte_sizes_and_headers_are_still_compared(saved) -> None:
    folder = saved.save(5)
    damage(folder.shard(0))
    verify(folder, deep=False)
    damage(folder.shard(0), folder.shard(0).read_bytes().index(b"model/whole"))
    with pytest.raises(BadCheckpointError, match="does not match the tensors"):
        verify(folder, deep=False)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("kind", ["link", "dead link", "pipe", "folder", "socket", "device", "no rights"])
def test_only_regular_files_are_read(saved, which: int, kind: str, monkeypatch) -> None:
    folder = saved.save(5)
    path = of(folder)[which]
    elsewhere = saved.run.path / "elsewhere"
    path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "dead link":
        path.symlink_to(saved.run.path / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        monkeypatch.chdir(folder.path)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        elsewhere.rename(path)
        real = os.open

        def refuse(name, *arguments, **fields):
            if name == path.name:
                raise PermissionError(13, "Permission denied")
            return real(name, *arguments, **fields)

        monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError if kind == "no rights" else BadCheckpointError, match=path.name):
        verify(folder)


def test_a_mark_belongs_to_one_manifest_and_a_damaged_mark_is_none(saved) -> None:
    old, new = saved.save(5), saved.save(6)
    assert not is_verified(new, verify(new))
    mark_verified(new, verify(new))
    assert is_verified(new, verify(new))
    shutil.copy(new.verified, old.verified)
    assert not is_verified(old, verify(old))
    data = new.verified.read_bytes()
    for at in range(len(data)):
        new.verified.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert not is_verified(new, verify(new, deep=False))


def test_files_are_read_beside_one_another(saved, monkeypatch) -> None:
    """Both shards are under way at once: each waits for the other."""
    import threading

    both = threading.Barrier(2, timeout=20)
    real = verify_module._check_shard

    def meet(*arguments, **fields) -> None:
        both.wait()
        real(*arguments, **fields)

    monkeypatch.setattr(verify_module, "_check_shard", meet)
    monkeypatch.setattr(verify_module.os, "cpu_count", lambda: 2)
    verify(saved.save(5))
