"""The commit: complete or invisible, never overwritten, fenced, rolled forward."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from muster.jobs.basics.errors import BadCheckpointError, MusterError, RunFolderError, StorageError
from muster.jobs.checkpoint import commit, sealed
from muster.jobs.checkpoint.commit import FencedError, IncompleteError, abandon, begin, roll_forward
from muster.jobs.checkpoint.manifest import read_manifest
from muster.jobs.checkpoint.pieces import Piece, whole
from muster.jobs.checkpoint.shard import write_shard
from muster.jobs.checkpoint.verify import verify
from support.checkpoints import damage


def test_a_checkpoint_is_invisible_until_all_writers_are_done(saved) -> None:
    folder = saved.write(5, writers=(0,))
    with pytest.raises(IncompleteError, match=r"no \.ok of writers 1"):
        commit.commit(saved.run, folder, 2, deadline_s=0.0)
    with pytest.raises(FileNotFoundError):
        read_manifest(folder)
    saved.write(5, writers=(1,))
    manifest = commit.commit(saved.run, folder, 2, deadline_s=0.0)
    assert read_manifest(folder) == manifest == verify(folder)
    assert (manifest.step, manifest.attempt, manifest.meta["losses"]) == (5, 0, [[5, 1.5]])
    assert saved.holds(folder, manifest)


def test_a_commit_waits_for_a_slow_writer(saved) -> None:
    folder = saved.write(5, writers=(0,))
    asked = threading.Event()
    real = commit.time.sleep

    def sleep(seconds: float) -> None:
        asked.set()
        real(seconds)

    def late() -> None:
        assert asked.wait(20)
        saved.write(5, writers=(1,))

    thread = threading.Thread(target=late)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit.time, "sleep", sleep)
        thread.start()
        manifest = commit.commit(saved.run, folder, 2, deadline_s=30.0)
    thread.join()
    assert saved.holds(folder, manifest)


def test_names_in_order_of_the_calls_that_make_it_durable(saved, monkeypatch) -> None:
    """File before name, name before folder, shard before `.ok`, everything before the manifest, the parent last."""
    calls = []
    names = {}

    def noted(call):
        real = getattr(os, call)

        def act(*arguments, **fields):
            result = real(*arguments, **fields)
            if call == "open":
                names[result] = str(arguments[0])
            elif call == "rename":
                calls.append(("rename", str(arguments[1])))
            else:
                name = names.get(arguments[0], "?")
                calls.append(("sync", "file" if name.endswith(".tmp") else Path(name).name))
            return result

        return act

    folder = begin(saved.run, 5, 0)
    for call in ("open", "rename", "fsync"):
        monkeypatch.setattr(os, call, noted(call))
    write_shard(folder, 0, 1, [(whole("model/w", "U8", (2,)), b"ab")], meta={})
    commit.commit(saved.run, folder, 1)
    wanted = []
    for name in ("shard-00000.safetensors", "shard-00000.ok", "MANIFEST.json"):
        wanted += [("sync", "file"), ("rename", name), ("sync", folder.name)]
    assert calls == [*wanted, ("sync", "checkpoints")]


def test_whoever_commits_writes_the_same_bytes_and_a_second_commit_changes_nothing(saved) -> None:
    folder = saved.write(5)
    copy = saved.run.path / "copy"
    shutil.copytree(folder.path, copy)
    commit.commit(saved.run, folder, 2)
    before, data = folder.manifest.stat(), folder.manifest.read_bytes()
    assert commit.commit(saved.run, folder, 2).encoded == data
    after = folder.manifest.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    shutil.rmtree(folder.path)
    copy.rename(folder.path)
    assert roll_forward(saved.run) == [folder.name]
    assert folder.manifest.read_bytes() == data


def test_a_manifest_of_something_else_is_not_overwritten(saved) -> None:
    folder, other = saved.save(5), saved.save(6)
    data = folder.manifest.read_bytes()
    for each in (folder.shard(0), folder.ok(0)):
        each.unlink()
    write_shard(folder, 0, 2, [(whole("model/else", "U8", (2,)), b"ab")], meta={})
    for each in (folder.shard(1), folder.ok(1)):
        each.unlink()
    write_shard(folder, 1, 2, [])
    with pytest.raises(BadCheckpointError, match="already committed"):
        commit.commit(saved.run, folder, 2)
    assert folder.manifest.read_bytes() == data
    assert saved.holds(other, verify(other))


def test_a_late_writer_of_a_dead_attempt_cannot_commit(saved) -> None:
    folder = saved.write(5)
    saved.attempt(1)
    with pytest.raises(FencedError, match="attempt 1 has begun; attempt 0 can no longer commit"):
        commit.commit(saved.run, folder, 2)
    with pytest.raises(FencedError):
        begin(saved.run, 6, 0)
    assert not folder.manifest.exists()
    assert saved.names() == [folder.name]


@pytest.mark.parametrize("moment", ["manifest_of", "write_manifest"])
def test_an_attempt_that_begins_meanwhile_fences_the_commit_or_is_told_to_the_committer(
    saved, monkeypatch, moment: str
) -> None:
    """Before the manifest is made, while the last writer is waited for; or during the last rename."""
    folder = saved.write(5)
    real = getattr(commit, moment)

    def begun(*arguments):
        saved.attempt(1)
        return real(*arguments)

    monkeypatch.setattr(commit, moment, begun)
    with pytest.raises(FencedError):
        commit.commit(saved.run, folder, 2)
    assert folder.manifest.exists() == (moment == "write_manifest")


def test_what_only_lacks_its_commit_is_rolled_forward_also_after_the_next_attempt_has_begun(saved) -> None:
    saved.write(5)
    saved.write(6, writers=(0,))
    saved.write(7, writers=(1,))
    saved.attempt(1)
    assert roll_forward(saved.run, say=saved.say) == ["step-00000005.a000"]
    assert saved.said == ["step-00000005.a000 was saved by all 2 writers but not committed; it is now committed"]
    assert roll_forward(saved.run) == []
    assert saved.holds(saved.run.checkpoint(5, 0), verify(saved.run.checkpoint(5, 0)))


def test_a_branch_that_was_given_up_is_not_rolled_forward(saved) -> None:
    saved.save(5)
    saved.write(9)
    saved.attempt(1, "step-00000005.a000", 5)
    assert roll_forward(saved.run) == []


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: folder.shard(1).unlink(), "missing, although its .ok exists"),
        (lambda folder: folder.shard(1).write_bytes(b"short"), "5 bytes, but its .ok records"),
        (lambda folder: damage(folder.ok(1), 30), "damaged"),
        (lambda folder: shutil.copy(folder.ok(0), folder.ok(1)), "shard-00000.safetensors.*expected.*shard-00001"),
        (lambda folder: reseal(folder.ok(1), writers=3), "lists 3 writers, expected 2"),
        (lambda folder: reseal(folder.ok(1), step=4), "step is 4, expected 5"),
        (lambda folder: reseal(folder.ok(1), tensors=[]), "its parts have .* elements"),
        (lambda folder: reseal(folder.ok(1), bytes=True), "not valid numbers"),
        (lambda folder: reseal(folder.ok(1), tensors=[{"name": "x", "shape": []}]), "unknown dtype"),
        (lambda folder: reseal(folder.ok(1), more=1), "expected the keys"),
        (lambda folder: reseal(folder.ok(0), meta=None), "meta must be an object"),
    ],
)
def test_what_does_not_fit_together_is_never_committed(saved, harm, message: str) -> None:
    folder = saved.write(5)
    harm(folder)
    with pytest.raises(BadCheckpointError, match=message):
        commit.commit(saved.run, folder, 2, deadline_s=0.0)
    assert roll_forward(saved.run, say=saved.say) == []
    assert saved.said
    assert not folder.manifest.exists()


def reseal(path, **fields) -> None:
    path.write_bytes(sealed.seal({**sealed.unseal(path.read_bytes(), path), **fields}))


@pytest.mark.parametrize(
    ("second", "shape", "message"),
    [
        ((3, 8), (8,), "model/w"),
        ((5, 8), (8,), "model/w"),
        ((4, 7), (8,), "model/w"),
        ((4, 8), (2, 4), "disagree on its dtype or shape"),
    ],
)
def test_writers_that_overlap_leave_a_hole_or_disagree_make_no_checkpoint(saved, second, shape, message: str) -> None:
    folder = begin(saved.run, 1, 0)
    write_shard(folder, 0, 2, [(Piece("model/w", "U8", (8,), flat=(0, 4)), bytes(4))], meta={})
    write_shard(folder, 1, 2, [(Piece("model/w", "U8", shape, flat=second), bytes(second[1] - second[0]))])
    with pytest.raises(BadCheckpointError, match=message):
        commit.commit(saved.run, folder, 2)


def test_a_disk_that_fails_at_the_commit_leaves_it_uncommitted(saved, monkeypatch) -> None:
    folder = saved.write(5)

    def full(*arguments, **fields) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        with pytest.raises(StorageError, match=r"MANIFEST\.json: cannot be written: No space left"):
            commit.commit(saved.run, folder, 2)
    assert sorted(each.name for each in folder.path.iterdir()) == sorted(
        each.name for writer in (0, 1) for each in (folder.shard(writer), folder.ok(writer))
    )
    commit.commit(saved.run, folder, 2)


def test_a_save_that_is_given_up_gives_its_room_back_and_its_late_writers_find_nothing(saved) -> None:
    folder = saved.write(5, writers=(0,))
    abandon(folder)
    assert saved.names() == []
    with pytest.raises(MusterError):
        write_shard(folder, 1, 2, [])
    with pytest.raises(RunFolderError, match="is gone"):
        commit.commit(saved.run, folder, 2)
    abandon(folder)
    done = saved.save(6)
    abandon(done)
    assert saved.holds(done, verify(done))


def test_every_writer_may_make_the_folder(saved) -> None:
    assert begin(saved.run, 5, 0) == begin(saved.run, 5, 0)
    saved.run.checkpoint(6, 0).path.write_text("")
    with pytest.raises(RunFolderError, match="not a folder"):
        begin(saved.run, 6, 0)
