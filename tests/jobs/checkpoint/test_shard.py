"""Shards as the stock safetensors library sees them, and what a writer leaves when its disk fails."""

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors

from muster.jobs.basics.errors import BadCheckpointError, RunFolderError, StorageError
from muster.jobs.checkpoint import commit, disk
from muster.jobs.checkpoint.layout import read_header
from muster.jobs.checkpoint.pieces import ITEM_BYTES, Piece, whole
from muster.jobs.checkpoint.shard import ShardRecord, read_ok, write_shard
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointDir:
    return commit.begin(RunDir(tmp_path), 50, 3)


def stock(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Open a file with the stock library."""
    found = safetensors.deserialize(path.read_bytes())
    return {name: (each["dtype"], each["shape"], bytes(each["data"])) for name, each in found}


def reread(folder: CheckpointDir, writer: int) -> ShardRecord:
    with disk.opened_folder(folder.path) as within:
        return read_ok(folder, within, writer)


def test_the_stock_library_opens_every_type_and_every_kind_of_piece(folder: CheckpointDir) -> None:
    pieces = [(whole(f"model/{dtype}", dtype, (3,)), bytes(range(3 * ITEM_BYTES[dtype]))) for dtype in ITEM_BYTES]
    pieces += [
        (Piece("model/box", "F32", (4, 4), box=((1, 3), (0, 2))), bytes(16)),
        (Piece("model/flat", "U8", (4, 4), flat=(3, 10)), b"1234567"),
        (whole("model/scalar", "F64", ()), b"abcdefgh"),
        (whole("model/empty", "F32", (0, 7)), b""),
        (whole("modell/ü 漢", "I8", (1,)), b"x"),
    ]
    write_shard(folder, 0, 1, pieces, meta={})
    found = stock(folder.shard(0))
    assert found == {piece.key: (piece.dtype, list(piece.extent), data) for piece, data in pieces}
    with safetensors.safe_open(str(folder.shard(0)), framework="numpy") as file:
        metadata = file.metadata()
    assert (metadata["step"], metadata["attempt"]) == ("50", "3")
    box = json.loads(metadata["parts"])["model/box[1:3,0:2]"]
    assert box == {"name": "model/box", "shape": [4, 4], "box": [[1, 3], [0, 2]], "flat": None}


def test_every_tensor_is_aligned_to_its_elements_and_the_record_tells_where_it_is(folder: CheckpointDir) -> None:
    pieces = [(whole(f"model/{dtype}", dtype, (3,)), os.urandom(3 * ITEM_BYTES[dtype])) for dtype in ITEM_BYTES]
    record = write_shard(folder, 0, 1, pieces, meta={"step": 50})
    data = folder.shard(0).read_bytes()
    by_name = {piece.name: content for piece, content in pieces}
    for part in record.parts:
        assert part.offset % part.piece.item_bytes == 0
        assert data[part.offset : part.end] == by_name[part.piece.name]
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert reread(folder, 0) == record


def test_a_writer_with_nothing_to_save_saves_that(folder: CheckpointDir) -> None:
    record = write_shard(folder, 1, 2, [(Piece("model/w", "F32", (4,), flat=(2, 2)), b"")])
    assert record.parts == ()
    assert stock(folder.shard(1)) == {}


def test_nothing_is_written_twice(folder: CheckpointDir) -> None:
    write_shard(folder, 0, 1, [(whole("model/w", "U8", (2,)), b"ab")], meta={})
    before = folder.shard(0).stat()
    with pytest.raises(RunFolderError, match="never overwritten"):
        write_shard(folder, 0, 1, [(whole("model/w", "U8", (2,)), b"cd")], meta={})
    assert folder.shard(0).stat() == before


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(whole("model/w", "F32", (2,)), b"1234567")], "7 bytes, expected 8"),
        ([(whole("model/w", "U8", (2,)), b"ab"), (whole("model/w", "U8", (2,)), b"ab")], "given twice"),
        ([(whole("model/w", "U8", (2,)), memoryview(b"abcd")[::2])], "not contiguous"),
    ],
)
def test_a_buffer_that_does_not_fit_is_our_fault_and_leaves_nothing(folder, pieces, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_shard(folder, 0, 1, pieces, meta={})
    assert list(folder.path.iterdir()) == []


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file of this process grow over 64 KB: what a quota does, without a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("reserves", [True, False])
def test_a_file_that_cannot_grow_is_a_storage_error_and_leaves_nothing(
    folder: CheckpointDir, small_files: None, monkeypatch: pytest.MonkeyPatch, reserves: bool
) -> None:
    if not reserves:
        monkeypatch.setattr(disk, "_reserve", lambda descriptor, size: None)
    with pytest.raises(StorageError, match=r"shard-00000\.safetensors: cannot be written"):
        write_shard(folder, 0, 1, [(whole("model/w", "U8", (100_000,)), bytes(100_000))], meta={})
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "close"])
@pytest.mark.parametrize("number", [28, 122, 5, 30])
def test_every_call_that_writes_is_checked(folder, monkeypatch, call: str, number: int) -> None:
    real = getattr(os, call)
    failing = {"on": True}

    def fail(*arguments, **fields):
        if failing.pop("on", False):
            if call == "close":
                real(*arguments)
            raise OSError(number, os.strerror(number))
        return real(*arguments, **fields)

    monkeypatch.setattr(disk.os, call, fail)
    with pytest.raises(StorageError, match="cannot be written"):
        disk.write_file(folder.path, "x", [b"data"])
    monkeypatch.undo()
    assert list(folder.path.iterdir()) == []


def test_a_rename_whose_answer_was_lost_has_happened(folder: CheckpointDir, monkeypatch) -> None:
    """NFS sends a request again when its answer is lost, and the second one finds nothing to rename."""
    real = os.rename

    def twice(*arguments, **fields):
        real(*arguments, **fields)
        real(*arguments, **fields)

    monkeypatch.setattr(disk.os, "rename", twice)
    record = write_shard(folder, 0, 1, [(whole("model/w", "U8", (2,)), b"ab")], meta={})
    assert reread(folder, 0) == record


def test_a_rename_that_finds_somebody_elses_file_is_an_error(folder: CheckpointDir, monkeypatch) -> None:
    def lost(source, target, src_dir_fd, dst_dir_fd):
        (folder.path / target).write_bytes(b"another's")
        raise FileNotFoundError(2, "gone")

    monkeypatch.setattr(disk.os, "rename", lost)
    with pytest.raises(RunFolderError):
        disk.write_file(folder.path, "x", [b"ours"])


def test_a_folder_that_is_a_link_is_not_written_through(folder: CheckpointDir, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = folder.path.with_name("step-00000051.a003")
    link.symlink_to(elsewhere)
    for act in (
        lambda: write_shard(CheckpointDir(link), 0, 1, [], meta={}),
        lambda: commit.begin(RunDir(tmp_path), 51, 3),
    ):
        with pytest.raises((BadCheckpointError, RunFolderError), match="link"):
            act()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.cluster
def test_a_full_disk_shows_before_anything_is_written(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True, timeout=20)
    try:
        folder = commit.begin(RunDir(tmp_path), 1, 0)
        with pytest.raises(StorageError, match="No space left"):
            write_shard(folder, 0, 1, [(whole("model/w", "U8", (2 << 20,)), bytes(2 << 20))], meta={})
        assert list(folder.path.iterdir()) == []
        write_shard(folder, 0, 1, [(whole("model/w", "U8", (1 << 19,)), bytes(1 << 19))], meta={})
        assert reread(folder, 0).bytes == folder.shard(0).stat().st_size
        with folder.shard(0).open("rb") as file:
            assert read_header(file.fileno(), folder.shard(0).stat().st_size, "shard").tensors.keys() == {"model/w"}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=20)
