"""Any split of a tensor, read back by any other split, is the same bits."""

import hashlib
import itertools
import math
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.jobs.basics.errors import BadCheckpointError, RefusedError
from muster.jobs.checkpoint import commit, read
from muster.jobs.checkpoint.manifest import CheckpointManifest, read_manifest
from muster.jobs.checkpoint.pieces import ITEM_BYTES, Piece, whole
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from muster.jobs.runfolder.rundir import RunDir


def split_flat(draw: random.Random, name: str, dtype: str, shape: tuple[int, ...]) -> list[Piece]:
    """Cut a tensor into flat ranges at random places."""
    total = math.prod(shape)
    cuts = sorted({0, total, *(draw.randint(0, total) for _ in range(draw.randint(0, 4)))})
    return [Piece(name, dtype, shape, flat=each) for each in itertools.pairwise(cuts)]


def split_boxes(draw: random.Random, name: str, dtype: str, shape: tuple[int, ...]) -> list[Piece]:
    """Cut a tensor into boxes, by halving one of them at random again and again."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw.randint(0, 6) if shape else 0):
        box = boxes.pop(draw.randrange(len(boxes)))
        axis = draw.randrange(len(shape))
        start, stop = box[axis]
        cut = draw.randint(start, stop)
        boxes += [(*box[:axis], each, *box[axis + 1 :]) for each in ((start, cut), (cut, stop)) if each[0] < each[1]]
    return [Piece(name, dtype, shape, box=box) for box in boxes]


def split(draw: random.Random, name: str, dtype: str, shape: tuple[int, ...]) -> list[Piece]:
    """Cut a tensor in any way; one without elements stays whole."""
    if not math.prod(shape):
        return [whole(name, dtype, shape)]
    return draw.choice((split_flat, split_boxes))(draw, name, dtype, shape)


def part_of(piece: Piece, data: bytes) -> bytes:
    """Take a piece's elements out of a whole tensor, one by one."""
    item = piece.item_bytes
    return b"".join(data[at * item : (at + 1) * item] for start, stop in piece.runs() for at in range(start, stop))


def tensor_bytes(name: str, size: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(size)


def save(run: RunDir, writers: list[list[Piece]]) -> tuple[CheckpointDir, CheckpointManifest]:
    """Save pieces, a list per writer."""
    folder = commit.begin(run, 1, 0)
    for writer, pieces in enumerate(writers):
        data = [
            (each, part_of(each, tensor_bytes(each.name, each.item_bytes * each.tensor_elements))) for each in pieces
        ]
        write_shard(folder, writer, len(writers), data, meta={})
    return folder, commit.commit(run, folder, len(writers))


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=4),
    writers=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_what_was_saved_in_one_split_is_read_in_any_other(tensors, writers: int, seed: int) -> None:
    draw = random.Random(seed)
    saved: list[list[Piece]] = [[] for _ in range(writers)]
    for number, (dtype, shape) in enumerate(tensors):
        for piece in split(draw, f"model/{number}", dtype, shape):
            draw.choice(saved).append(piece)
    with tempfile.TemporaryDirectory() as text:
        folder, manifest = save(RunDir(Path(text)), saved)
        with CheckpointReader(folder, manifest) as reader:
            assert reader.names() == sorted(f"model/{number}" for number in range(len(tensors)))
            for number, (dtype, shape) in enumerate(tensors):
                data = tensor_bytes(f"model/{number}", ITEM_BYTES[dtype] * math.prod(shape))
                for piece in (whole(f"model/{number}", dtype, shape), *split(draw, f"model/{number}", dtype, shape)):
                    buffer = bytearray(piece.nbytes)
                    reader.read_into(piece, buffer)
                    assert bytes(buffer) == part_of(piece, data)


@pytest.mark.parametrize(("direct", "window"), [(1, 1), (1 << 20, 16), (8, 64)])
def test_long_and_short_runs_are_read_the_same(monkeypatch, tmp_path, direct: int, window: int) -> None:
    monkeypatch.setattr(read, "DIRECT_BYTES", direct)
    monkeypatch.setattr(read, "WINDOW_BYTES", window)
    shape = (7, 5, 3)
    columns = [Piece("model/w", "F32", shape, box=((0, 7), (at, at + 1), (0, 3))) for at in range(5)]
    folder, manifest = save(RunDir(tmp_path), [columns[:2], columns[2:]])
    wanted = Piece("model/w", "F32", shape, box=((1, 6), (1, 4), (1, 3)))
    buffer = bytearray(wanted.nbytes)
    with CheckpointReader(folder, manifest) as reader:
        reader.read_into(wanted, buffer)
    assert bytes(buffer) == part_of(wanted, tensor_bytes("model/w", 4 * 105))


def test_a_row_out_of_many_columns_reads_little(monkeypatch, tmp_path) -> None:
    """A part is not walked from its beginning to find the few elements that are wanted."""
    shape = (4096, 8)
    columns = [Piece("model/w", "U8", shape, box=((0, 4096), (at, at + 4))) for at in (0, 4)]
    folder, manifest = save(RunDir(tmp_path), [columns])
    wanted = Piece("model/w", "U8", shape, box=((4000, 4001), (0, 8)))
    for part in manifest.tensors["model/w"].parts:
        assert [count for _, _, count in read.shared_runs(part, wanted)] == [4]
    buffer = bytearray(8)
    with CheckpointReader(folder, manifest) as reader:
        reader.read_into(wanted, buffer)
    assert bytes(buffer) == part_of(wanted, tensor_bytes("model/w", 4096 * 8))


def test_a_tensor_that_is_not_there_or_not_alike_is_refused_with_both_shapes(saved) -> None:
    folder = saved.save(5)
    with CheckpointReader(folder, read_manifest(folder)) as reader:
        with pytest.raises(RefusedError, match="no tensor model/other"):
            reader.piece("model/other")
        with pytest.raises(RefusedError, match=r"model/split is F32 \[6, 4\], but the job needs F32 \[4, 6\]"):
            reader.read_into(whole("model/split", "F32", (4, 6)), bytearray(96))
        with pytest.raises(RefusedError, match=r"the job needs F64"):
            reader.read_into(whole("model/split", "F64", (6, 4)), bytearray(192))
        with pytest.raises(ValueError, match="buffer of 96 bytes"):
            reader.read_into(reader.piece("model/split"), bytearray(95))
        with pytest.raises(ValueError, match="writable"):
            reader.read_into(reader.piece("model/split"), bytes(96))


@pytest.mark.parametrize("damage", ["gone", "short", "link"])
def test_a_shard_that_is_not_what_was_saved_is_not_read(saved, damage: str) -> None:
    folder = saved.save(5)
    manifest = read_manifest(folder)
    data = folder.shard(1).read_bytes()
    folder.shard(1).unlink()
    if damage == "short":
        folder.shard(1).write_bytes(data[:-1])
    if damage == "link":
        (saved.run.path / "elsewhere").write_bytes(data)
        folder.shard(1).symlink_to(saved.run.path / "elsewhere")
    with CheckpointReader(folder, manifest) as reader, pytest.raises(BadCheckpointError, match="shard-00001"):
        reader.read_into(reader.piece("model/split"), bytearray(96))


def test_a_shard_cut_short_after_it_was_opened_is_noticed(saved) -> None:
    folder = saved.save(5)
    with CheckpointReader(folder, read_manifest(folder)) as reader:
        reader.read_into(reader.piece("optimizer/whole/step"), bytearray(8))
        with folder.shard(1).open("r+b") as file:
            file.truncate(16)
        with pytest.raises(BadCheckpointError, match="truncated"):
            reader.read_into(reader.piece("optimizer/whole/step"), bytearray(8))
