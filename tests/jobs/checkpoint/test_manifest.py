"""Manifests and headers of strangers: whatever stands in them, they are refused in one line or hold together."""

import copy
import json
import time

import pytest

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint import sealed
from muster.jobs.checkpoint.coverage import check_coverage
from muster.jobs.checkpoint.layout import read_header
from muster.jobs.checkpoint.manifest import parse_manifest, read_manifest
from muster.jobs.checkpoint.pieces import Piece
from muster.jobs.checkpoint.verify import verify


def body_of(folder) -> dict:
    return sealed.unseal(folder.manifest.read_bytes(), "manifest")


def set_at(body: dict, path: tuple, value) -> dict:
    """Return a copy with one value changed; ... removes it."""
    changed = copy.deepcopy(body)
    at = changed
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return changed


SPLIT, WHOLE = ("tensors", "model/split"), ("tensors", "model/whole")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "version 2, expected 1"),
        (("version",), True, "version True"),
        (("version",), ..., "version None"),
        (("more",), 1, "expected the keys"),
        (("meta",), ..., "expected the keys"),
        (("meta",), [], "meta must be an object"),
        (("step",), 6, "another checkpoint"),
        (("step",), 5.0, "another checkpoint"),
        (("attempt",), 1, "another checkpoint"),
        (("files",), [], "files must list"),
        (("files",), {}, "files must list"),
        (("files", 0), [], "each file must have"),
        (("files", 0, "file"), "../../../etc/passwd", "expected shard-00000"),
        (("files", 0, "file"), "/etc/passwd", "expected shard-00000"),
        (("files", 0, "file"), "shard-00001.safetensors", "expected shard-00000"),
        (("files", 0, "file"), None, "expected shard-00000"),
        (("files", 0, "bytes"), -1, "not a valid size"),
        (("files", 0, "bytes"), 1e3, "not a valid size"),
        (("files", 0, "bytes"), 2**62, "not a valid size"),
        (("files", 0, "bytes"), True, "not a valid size"),
        (("files", 0, "bytes"), 9, "not a valid size|end at byte"),
        (("files", 0, "sha256"), "0" * 63, "64 hexadecimal"),
        (("files", 0, "sha256"), "G" * 64, "64 hexadecimal"),
        (("files", 0, "sha256"), "A" * 64, "64 hexadecimal"),
        (("files", 0, "sha256"), 5, "64 hexadecimal"),
        (("tensors",), [], "tensors must be an object"),
        (WHOLE, None, "each tensor must have"),
        ((*WHOLE, "more"), 1, "each tensor must have"),
        ((*WHOLE, "parts"), [], "parts must be a nonempty list"),
        ((*WHOLE, "parts"), {}, "parts must be a nonempty list"),
        ((*WHOLE, "parts", 0), 5, "each part must have"),
        ((*WHOLE, "parts", 0, "more"), 5, "each part must have"),
        ((*WHOLE, "parts", 0, "file"), 2, "file 2 is not one of 2 files"),
        ((*WHOLE, "parts", 0, "file"), -1, "file -1 is not one of 2 files"),
        ((*WHOLE, "parts", 0, "file"), False, "file False"),
        ((*WHOLE, "parts", 0, "file"), 1, "gap or an overlap|end at byte"),
        ((*WHOLE, "parts", 0, "offset"), -8, "whole number"),
        ((*WHOLE, "parts", 0, "offset"), 2**70, "digits|gap or an overlap"),
        ((*WHOLE, "parts", 0, "offset"), 0, "gap or an overlap|header"),
        ((*WHOLE, "parts", 0, "offset"), ..., "whole number"),
        ((*WHOLE, "dtype"), "F64", "gap or an overlap|end at byte"),
        ((*WHOLE, "dtype"), "OBJECT", "unknown dtype"),
        ((*WHOLE, "dtype"), ["F32"], "unknown dtype"),
        ((*WHOLE, "shape"), [6], "gap or an overlap|end at byte"),
        ((*WHOLE, "shape"), [2**60], "whole number"),
        ((*WHOLE, "shape"), [2**40, 2**40], "elements"),
        ((*WHOLE, "shape"), [-5], "whole number"),
        ((*WHOLE, "shape"), "5", "expected a list"),
        ((*WHOLE, "parts", 0, "flat"), [0, 6], "does not lie in"),
        ((*WHOLE, "parts", 0, "box"), [[0, 5]], "not in the form"),
        ((*SPLIT, "parts", 0, "box"), [[0, 3], [0, 4]], "have 28 of 24 elements"),
        ((*SPLIT, "parts", 0, "box"), [[1, 3], [0, 4]], "missing or stored twice"),
        ((*SPLIT, "parts", 0, "box"), [[2, 0], [0, 4]], "does not lie"),
        ((*SPLIT, "parts", 0, "box"), [[0, 2]], "1 ranges"),
        ((*SPLIT, "parts", 0, "box"), [0, 2], "expected a list"),
        ((*SPLIT, "parts", 0, "box"), [[0, 2], [0, 4, 4]], "two whole numbers"),
        ((*SPLIT, "parts", 0, "box"), ..., "have 40 of 24 elements"),
        ((*SPLIT, "parts", 0, "flat"), [0, 8], "got both"),
        ((*SPLIT, "parts", 1), ..., "have 8 of 24 elements"),
        ((*SPLIT, "shape"), [4, 6], "does not lie"),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_refused(saved, path, value, message: str) -> None:
    folder = saved.save(5)
    data = sealed.seal(set_at(body_of(folder), path, value))
    with pytest.raises(BadCheckpointError, match=message) as caught:
        parse_manifest(folder, data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":-Infinity}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' + b"[" * 100 + b"]" * 100 + b"}",
        b"[]",
        b"\xff",
        b"",
        b'{"a":1}{"b":2}',
        b'{"a":"\n"}',
    ],
)
def test_json_that_is_not_ours_is_refused_without_a_crash(body: bytes) -> None:
    with pytest.raises(BadCheckpointError):
        sealed.parse(body, "somewhere")


def test_json_that_would_fill_the_memory_is_refused_before_it_is_parsed() -> None:
    begun = time.process_time()
    with pytest.raises(BadCheckpointError, match="larger than any file"):
        sealed.parse(b'{"a":[' + b"[]," * 5_000_000 + b"0]}", "somewhere")
    assert time.process_time() - begun < 20


def test_what_is_sealed_comes_back_and_numbers_that_are_none_become_null() -> None:
    body = {"b": [1, 2.5, None, True, "ü\ud800"], "a": {"x": float("nan"), "y": -float("inf")}}
    data = sealed.seal(body)
    assert sealed.unseal(data, "here") == {**body, "a": {"x": None, "y": None}}
    assert sealed.seal(dict(reversed(body.items()))) == data


@pytest.mark.parametrize("cut", [0, 5, 9, 20, 90])
def test_a_sealed_file_cut_short_is_refused(cut: int) -> None:
    data = sealed.seal({"a": 1})
    with pytest.raises(BadCheckpointError):
        sealed.unseal(data[: len(data) - cut - 1], "here")


def header(text: bytes, body: bytes = b"", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def one(**fields) -> bytes:
    return json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **fields}}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too few"),
        (b"1234567", "too few"),
        (header(b"{}", length=2**63), "exceeds the file"),
        (header(b"{}", length=2**64 - 1), "exceeds the file"),
        (header(b"{}", length=3), "exceeds the file"),
        (header(b"{", b"}"), "JSON"),
        (header(b"[]"), "JSON object"),
        (header(b'{"w":[]}'), "expected dtype"),
        (header(one(dtype="F128"), b"1234"), "unknown dtype"),
        (header(one(shape=[-4]), b"1234"), "whole number"),
        (header(one(shape=[2**62, 4]), b"1234"), "whole number"),
        (header(one(shape=[5]), b"1234"), "do not match"),
        (header(one(data_offsets=[0, 5]), b"12345"), "do not match"),
        (header(one(data_offsets=[-4, 0]), b"1234"), "do not match"),
        (header(one(data_offsets=[4, 8]), b"12345678"), "gap or an overlap"),
        (header(one(data_offsets=[0]), b"1234"), "two whole numbers"),
        (header(one(data_offsets=[0, 4.0]), b"1234"), "two whole numbers"),
        (header(one(), b"123"), "end at byte"),
        (header(one(), b"12345"), "end at byte"),
        (header(one()[:-1] + b',"v":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}', b"1234"), "gap or an overlap"),
        (header(one()[:-1] + b',"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"), "duplicate key"),
        (header(b'{"__metadata__":{"a":1}}'), "metadata"),
        (header(b'{"__metadata__":[]}'), "metadata"),
        (header(b'{"\\u001b[2J":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"1"), "printable"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, data: bytes, message: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with path.open("rb") as file, pytest.raises(BadCheckpointError, match=message) as caught:
        read_header(file.fileno(), len(data), "x")
    assert "\x1b" not in str(caught.value)


def test_a_shard_that_says_other_things_than_the_manifest_is_refused_whatever_its_hash(saved) -> None:
    """A manifest made to fit a foreign shard does not make it ours."""
    import hashlib

    folder = saved.save(5)
    data = folder.shard(1).read_bytes()
    swapped = data.replace(b"[4,4]", b"[2,8]")
    assert swapped != data
    folder.shard(1).write_bytes(swapped)
    body = set_at(body_of(folder), ("files", 1, "sha256"), hashlib.sha256(swapped).hexdigest())
    folder.manifest.write_bytes(sealed.seal(body))
    read_manifest(folder)
    with pytest.raises(BadCheckpointError, match="does not match the tensors"):
        verify(folder)


def columns(*bounds: tuple[int, int], rows: int = 2**30) -> list[Piece]:
    return [Piece("w", "F32", (rows, 8), box=((0, rows), each)) for each in bounds]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (columns((0, 4), (4, 8)), None),
        (columns((0, 4), (3, 7)), "the same elements"),
        (columns((0, 4), (4, 7)), "elements"),
        ([*columns((0, 4), rows=2), Piece("w", "F32", (2, 8), flat=(8, 16))], "mixed"),
        ([Piece("w", "F32", (2, 8), box=((0, 1), (0, 8))), Piece("w", "F32", (2, 8), flat=(8, 16))], None),
        ([Piece("w", "F32", (2, 8), flat=(0, 16)), Piece("w", "F32", (2, 8), flat=(3, 3))], "a part is empty"),
    ],
)
def test_coverage_is_decided_by_arithmetic(pieces: list[Piece], message: str | None) -> None:
    if message is None:
        check_coverage("w", pieces, "here")
    else:
        with pytest.raises(BadCheckpointError, match=message):
            check_coverage("w", pieces, "here")


def test_boxes_that_would_take_forever_to_compare_are_refused() -> None:
    count = 1600
    shape = (count, 2, count)
    pieces = [Piece("w", "U8", shape, box=((0, count), (0, 2), (at, at + 1))) for at in range(count)]
    check_coverage("w", pieces, "here")
    stairs = (2 * count, count)  # a step each: they differ in both dimensions, and in the first one they all meet
    crossed = [Piece("w", "U8", stairs, box=((at, at + count), (at, at + 1))) for at in range(count)]
    crossed.append(Piece("w", "U8", stairs, box=((count, 2 * count), (0, count))))
    with pytest.raises(BadCheckpointError, match="too many to compare"):
        check_coverage("w", crossed, "here")
