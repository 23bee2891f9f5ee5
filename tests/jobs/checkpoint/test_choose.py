"""Which checkpoint is gone on from: lineage before numbers, the last good one before the newest."""

import shutil

import pytest

from muster.jobs.basics.errors import BadCheckpointError, NoCheckpointError, StorageError
from muster.jobs.checkpoint import choose
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.checkpoint.verify import is_verified
from support.checkpoints import damage

A5, A9, A50 = "step-00000005.a000", "step-00000009.a000", "step-00000050.a000"


def chosen(saved, **fields) -> str | None:
    found = newest_good(saved.run, say=saved.say, **fields)
    if found is None:
        return None
    assert saved.holds(found.folder, found.manifest)
    return found.folder.name


def test_a_run_without_good_checkpoints_has_none(saved) -> None:
    assert chosen(saved) is None
    saved.write(5, writers=(0,))
    assert chosen(saved) is None
    assert saved.said == []
    for step in (6, 9):
        damage(saved.save(step).shard(0))
    assert chosen(saved) is None
    assert len(saved.said) == 2


def test_the_newest_by_number_is_chosen_and_marked_as_read(saved) -> None:
    saved.save_all(9, 99_999_999, 100_000_000, 5)
    found = newest_good(saved.run)
    assert found is not None
    assert found.manifest.step == 100_000_000
    assert is_verified(found.folder, found.manifest)
    before = found.folder.verified.stat()
    newest_good(saved.run)
    assert found.folder.verified.stat() == before


def test_what_the_leader_left_uncommitted_is_rolled_forward_and_chosen(saved) -> None:
    saved.save(5)
    saved.write(9)
    assert chosen(saved) == A9


@pytest.mark.parametrize("which", ["shard", "manifest"])
def test_a_bad_one_is_put_aside_in_one_line_and_the_one_before_is_taken(saved, which: str) -> None:
    saved.save(5)
    folder = saved.save(9)
    damage(folder.shard(1) if which == "shard" else folder.manifest, -5)
    assert chosen(saved) == A5
    (line,) = saved.said
    assert line.startswith(f"{A9} is bad and was renamed to bad-{A9}: ")
    assert "\n" not in line
    assert saved.names() == [f"bad-{A9}", A5]
    assert chosen(saved) == A5


def test_a_higher_step_of_a_branch_that_was_given_up_never_wins(saved) -> None:
    saved.save_all(5, 9, 50)
    saved.attempt(1, A9, 9)
    assert chosen(saved) == A9
    saved.save(12, 1)
    assert chosen(saved) == "step-00000012.a001"
    damage(saved.run.checkpoint(12, 1).shard(0))
    assert chosen(saved) == A9
    damage(saved.run.checkpoint(9, 0).shard(0))
    assert chosen(saved) == A5


def test_the_line_is_followed_over_attempts_that_saved_nothing(saved) -> None:
    saved.save_all(5, 9)
    saved.attempt(1, A5, 5)
    saved.attempt(2, A5, 5)
    saved.save(7, 2)
    saved.attempt(3, "step-00000007.a002", 7)
    saved.attempt(4)
    assert chosen(saved) == "step-00000007.a002"
    shutil.rmtree(saved.run.checkpoint(7, 2).path)
    assert chosen(saved) == A5


def test_an_attempt_that_began_anew_forgets_what_was_before(saved) -> None:
    saved.save(50)
    saved.attempt(1, None)
    assert chosen(saved) is None
    saved.save(5, 1)
    assert chosen(saved) == "step-00000005.a001"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        '{"checkpoint": 5}',
        '{"checkpoint": "../../etc"}',
        '{"checkpoint": "step-00000005.a001"}',
        '{"step": 5}',
        '{"checkpoint": "step-5.a0"}',
    ],
)
def test_an_attempt_that_does_not_say_what_it_begins_from_is_passed_over(saved, text: str | None) -> None:
    saved.save(5)
    saved.attempt(1)
    if text is not None:
        saved.run.attempt(1).resume.write_text(text)
    assert chosen(saved) == A5
    assert any("using the attempt before it" in line for line in saved.said) == (text is not None)


def test_one_that_was_asked_for_is_taken_or_it_is_said_why_not(saved) -> None:
    saved.save_all(5, 9)
    saved.attempt(1, A5, 5)
    saved.save(7, 1)
    assert chosen(saved, step=5) == A5
    assert chosen(saved, name=A9) == A9
    for asked in ({"step": 9}, {"step": 6}, {"name": A50}, {"name": "../../etc"}, {"name": f"bad-{A5}"}):
        with pytest.raises(NoCheckpointError, match="the run has "):
            chosen(saved, **asked)
    saved.write(50, 1, writers=(0,))
    with pytest.raises(NoCheckpointError, match="never committed"):
        chosen(saved, name="step-00000050.a001")
    damage(saved.run.checkpoint(9, 0).shard(0))
    with pytest.raises(BadCheckpointError, match="sha256"):
        chosen(saved, name=A9)


def test_one_that_cannot_be_read_at_the_moment_is_left_where_it_is(saved, monkeypatch) -> None:
    saved.save_all(5, 9)
    real = choose.verify

    def failing(folder, *, deep):
        if folder.name == A9:
            raise StorageError("input/output error")
        return real(folder, deep=deep)

    monkeypatch.setattr(choose, "verify", failing)
    assert chosen(saved) == A5
    assert saved.names() == [A5, A9]
    assert saved.said == [f"{A9} cannot be read at the moment and was not changed: input/output error"]


def test_a_disk_that_takes_no_writes_still_gives_its_checkpoints(saved, monkeypatch) -> None:
    saved.save(5)
    saved.write(9)

    def refuse(*arguments, **fields):
        raise StorageError("read-only file system")

    monkeypatch.setattr("muster.jobs.checkpoint.disk.write_file", refuse)
    assert chosen(saved) == A5
    assert saved.said == [
        "cannot commit pending checkpoints: read-only file system",
        f"{A5} is valid, but could not be marked as verified: read-only file system",
    ]


def test_a_folder_of_checkpoints_that_is_a_link_is_refused(saved) -> None:
    saved.save(5)
    elsewhere = saved.run.path / "elsewhere"
    saved.run.checkpoints.rename(elsewhere)
    saved.run.checkpoints.symlink_to(elsewhere)
    with pytest.raises(BadCheckpointError, match="link"):
        chosen(saved)


def test_a_checkpoint_that_is_a_link_is_put_aside_and_what_it_points_to_is_untouched(saved) -> None:
    saved.save(5)
    elsewhere = saved.run.path / A9
    shutil.copytree(saved.save(9).path, elsewhere)
    shutil.rmtree(saved.run.checkpoint(9, 0).path)
    saved.run.checkpoint(9, 0).path.symlink_to(elsewhere)
    assert chosen(saved) == A5
    assert len(list(elsewhere.iterdir())) == 5
    assert saved.names() == [f"bad-{A9}", A5]
