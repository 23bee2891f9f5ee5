"""Mutated checkpoints: whatever is changed, the only answer is BadCheckpointError, or the bits that were saved."""

import hashlib
import json
import tempfile
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.jobs.basics.errors import BadCheckpointError
from muster.jobs.checkpoint import sealed
from muster.jobs.checkpoint.layout import ShardHeader, read_header
from muster.jobs.checkpoint.manifest import CheckpointManifest, parse_manifest
from muster.jobs.checkpoint.read import CheckpointReader
from muster.jobs.checkpoint.verify import verify
from muster.jobs.runfolder.checkpointdir import CheckpointDir
from support.checkpoints import Saved

pytestmark = pytest.mark.slow

NUMBERS = (-1, 0, 1, 7, 8, 2**31, 2**52, 2**63, 2**64, 1.5)
NASTY = st.sampled_from([*NUMBERS, None, True, "", "../x", "/etc/passwd", "\0", [], {}, [[]], "F32"])
VALUES = st.one_of(NASTY, st.integers(), st.text(max_size=8), st.lists(st.integers(-9, 99), max_size=3))


def places(value, path=()) -> list[tuple]:
    """List the paths to every value inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutate(body: dict, data: st.DataObject) -> dict:
    """Change, remove or double a few values."""
    body = json.loads(json.dumps(body))
    for _ in range(data.draw(st.integers(1, 3))):
        paths = places(body)
        if not paths:
            break
        *path, key = data.draw(st.sampled_from(paths))
        at = body
        for each in path:
            at = at[each]
        action = data.draw(st.sampled_from(["set", "set", "set", "delete", "double"]))
        if action == "delete":
            del at[key]
        elif action == "double" and isinstance(at, list):
            at.append(at[key])
        elif action == "double" and isinstance(at, dict):
            at[f"{key}x"] = at[key]
        else:
            at[key] = data.draw(VALUES)
    return body


@dataclass(frozen=True)
class Original:
    """A checkpoint as it was saved: the files, what the manifest says, what a load gives."""

    folder: CheckpointDir
    body: dict
    files: dict[str, bytes]
    loaded: tuple[CheckpointManifest, dict[str, bytes]]

    def put(self, name: str, content: bytes) -> None:
        """Give one file other bytes, and all others their own."""
        for each, data in self.files.items():
            (self.folder.path / each).write_bytes(content if each == name else data)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """One checkpoint for all examples."""
    folder = Saved(tmp_path_factory.mktemp("fuzz") / "run").save(5)
    files = {entry.name: entry.read_bytes() for entry in folder.path.iterdir()}
    return Original(folder, sealed.unseal(files["MANIFEST.json"], "manifest"), files, load(folder))


def load(folder: CheckpointDir) -> tuple[CheckpointManifest, dict[str, bytes]]:
    """Verify and read everything."""
    manifest = verify(folder)
    found = {}
    with CheckpointReader(folder, manifest) as reader:
        for name in reader.names():
            buffer = bytearray(reader.piece(name).nbytes)
            reader.read_into(reader.piece(name), buffer)
            found[name] = bytes(buffer)
    return manifest, found


def refused(act, *arguments):
    """Return what a call returns, or the message of its refusal; any other error is a failure."""
    try:
        return act(*arguments)
    except BadCheckpointError as error:
        return str(error)


def check_load(original: Original) -> None:
    """Check that a load is refused in one line, or gives the tensors that were saved."""
    loaded = refused(load, original.folder)
    if isinstance(loaded, str):
        assert "\n" not in loaded
    else:
        assert (loaded[0].tensors, loaded[1]) == (original.loaded[0].tensors, original.loaded[1])


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_mutated_manifest_is_refused_or_says_the_same_of_the_tensors(original: Original, data: st.DataObject) -> None:
    """Sealed again by who mutated it: the hash is no protection, the checks are."""
    original.put("MANIFEST.json", sealed.seal(mutate(original.body, data)))
    check_load(original)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_a_mutated_header_is_refused_or_the_old_one(original: Original, data: st.DataObject) -> None:
    text = original.files["shard-00000.safetensors"]
    length = int.from_bytes(text[:8], "little")
    head = json.dumps(mutate(json.loads(text[8 : 8 + length]), data), separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    changed = len(head).to_bytes(8, "little") + head + text[8 + length :]
    original.put("shard-00000.safetensors", changed)
    # Its hash and size made to fit, as a stranger would.
    body = json.loads(json.dumps(original.body))
    body["files"][0] |= {"bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    original.folder.manifest.write_bytes(sealed.seal(body))
    check_load(original)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), which=st.integers(0, 4))
def test_damaged_bytes_are_refused_or_were_not_needed(original: Original, data: st.DataObject, which: int) -> None:
    """Bytes changed, cut out or put in, anywhere in any file; the `.ok` files are of no use after the commit."""
    name = sorted(original.files)[which]
    content = bytearray(original.files[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        count = data.draw(st.integers(0, 9))
        content[at : at + count] = data.draw(st.binary(max_size=9))
    original.put(name, bytes(content))
    is_the_same = bytes(content) == original.files[name]
    try:
        assert load(original.folder) == original.loaded
        assert is_the_same or name.endswith(".ok")
    except BadCheckpointError:
        assert not is_the_same


LENGTH_THEN_BYTES = st.builds(
    lambda length, rest: length.to_bytes(8, "little") + rest, st.integers(0, 2**64 - 1), st.binary(max_size=99)
)


@settings(max_examples=120, deadline=None)
@given(content=st.one_of(st.binary(max_size=200), LENGTH_THEN_BYTES))
def test_any_bytes_as_a_header_or_a_manifest_are_refused_in_words(original: Original, content: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        found = refused(read_header, file.fileno(), len(content), "x")
        assert isinstance(found, ShardHeader) or "\n" not in found
    with pytest.raises(BadCheckpointError) as caught:
        parse_manifest(original.folder, content)
    assert "\n" not in str(caught.value)
