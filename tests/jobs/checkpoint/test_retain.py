"""What is deleted, and what never is."""

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.errors import RunFolderError
from muster.jobs.checkpoint import retain as retain_module
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.checkpoint.retain import RetentionEntry, plan, retain
from support.checkpoints import damage


def entry(text: str) -> RetentionEntry:
    """Read 'verified 5 a0 gone'."""
    state, step, attempt, *more = text.split()
    number = int(attempt.removeprefix("a"))
    return RetentionEntry(f"{state}-{step}-{attempt}", int(step), number, state, bool(more))


@pytest.mark.parametrize(
    ("keep", "there", "gone"),
    [
        (2, ["verified 5 a0", "verified 6 a0"], []),
        (2, ["verified 5 a0", "verified 6 a0", "verified 7 a0"], [0]),
        (1, ["verified 5 a0", "verified 6 a0", "verified 7 a0"], [0]),  # never below two
        (3, ["verified 5 a0", "verified 6 a0", "verified 7 a0"], []),
        (2, ["verified 9900 a0", "verified 10000 a0", "verified 9950 a0"], [0]),  # numbers, not texts
        (2, ["verified 5 a0", "verified 6 a0", "committed 7 a0"], []),  # 7 may be bad
        (2, ["verified 5 a0", "committed 6 a0", "committed 7 a0"], []),
        (2, ["committed 4 a0", "verified 5 a0", "verified 6 a0", "committed 7 a0"], [0]),
        (2, ["verified 50 a0 gone", "verified 5 a0", "verified 6 a1"], [0]),
        (2, ["verified 50 a0 gone", "verified 5 a0"], []),
        (2, ["verified 9 a0", "verified 5 a1", "verified 6 a1"], [0]),  # a rollback: attempt before step
        (2, ["unfinished 4 a0", "verified 5 a0", "verified 6 a0", "unfinished 7 a0", "unfinished 8 a1"], [0]),
        (2, ["unfinished 4 a0", "verified 6 a0"], []),
        (2, ["bad 4 a0", "verified 5 a0", "verified 6 a0", "bad 7 a0"], [0]),
        (2, ["bad 4 a0", "verified 5 a0", "committed 6 a0"], []),
        (2, ["trash 9 a0", "trash 1 a0"], [1, 0]),
        (3, ["committed 1 a0", "verified 5 a0", "verified 6 a0"], []),
    ],
)
def test_the_table(keep: int, there: list[str], gone: list[int]) -> None:
    entries = [entry(text) for text in there]
    wanted = [entries[index].name for index in gone]
    for seed in range(5):
        random.Random(seed).shuffle(entries)
        assert plan(entries, keep) == wanted


def test_what_is_protected_stays() -> None:
    entries = [entry(f"verified {step} a0") for step in range(5)]
    assert plan(entries, 2, ["verified-1-a0"]) == ["verified-0-a0", "verified-2-a0"]


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["verified", "committed", "unfinished", "bad", "trash"]),
        st.integers(0, 30),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda each: each[1:3],
)


@given(ENTRIES, st.integers(0, 5))
def test_two_good_ones_and_all_that_is_newer_always_stay(rows, keep: int) -> None:
    entries = [
        RetentionEntry(f"{row}", row[1], row[2], row[0], row[3] and row[0] in ("verified", "committed")) for row in rows
    ]
    gone = set(plan(entries, keep))
    good = sorted((each.attempt, each.step) for each in entries if each.state == "verified" and not each.abandoned)
    left = [each for each in entries if each.name not in gone]
    kept = [each for each in left if each.state == "verified" and not each.abandoned]
    assert len(kept) >= min(len(good), max(keep, 2))
    assert not any(each.state == "trash" for each in left)
    if len(good) < 2:
        assert {each.state for each in entries if each.name in gone} <= {"trash"}
    else:
        assert not any(
            (each.attempt, each.step) > good[-1] for each in entries if each.name in gone if each.state != "trash"
        )


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}.a000" for step in steps]


def test_old_ones_go_after_the_new_ones_were_read_again(saved) -> None:
    saved.save_all(1, 2, 3, 4)
    assert retain(saved.run, 2) == names(1, 2)
    assert saved.names() == names(3, 4)
    assert all(saved.run.checkpoint(step, 0).verified.exists() for step in (3, 4))
    assert retain(saved.run, 2) == []


def test_a_bad_newest_one_costs_no_good_one(saved) -> None:
    saved.save_all(1, 2, 3)
    damage(saved.run.checkpoint(3, 0).shard(0))
    assert retain(saved.run, 2, say=saved.say) == []
    assert saved.names() == [f"bad-{names(3)[0]}", *names(1, 2)]
    assert "renamed to" in saved.said[0]


def test_what_the_newest_attempt_began_from_stays_and_what_it_left_behind_goes(saved) -> None:
    saved.save_all(1, 2, 9)
    saved.attempt(1, names(1)[0], 1)
    assert retain(saved.run, 2) == []
    saved.save_all(3, 4, 5, attempt=1)
    gone = retain(saved.run, 2)
    assert gone == [*names(2, 9), "step-00000003.a001"]
    assert saved.names() == [names(1)[0], "step-00000004.a001", "step-00000005.a001"]
    found = newest_good(saved.run)
    assert found is not None
    assert found.folder.name == "step-00000005.a001"


def test_leftovers_of_a_killed_save_and_of_a_killed_deletion_go(saved) -> None:
    saved.write(1, writers=(0,))
    saved.save_all(2, 3)
    saved.write(4, writers=(0,))
    saved.save(5).path.rename(saved.run.checkpoint(5, 0).trash)
    retain(saved.run, 2)
    assert saved.names() == names(2, 3, 4)


def test_what_is_not_ours_is_not_touched(saved) -> None:
    saved.save_all(2, 3)
    outside = saved.run.path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    for name in ("trash-step-00000001.a000", "bad-step-00000001.a000", "step-00000001.a000"):
        (saved.run.checkpoints / name).symlink_to(outside)
    (saved.run.checkpoints / "trash-notes").mkdir()
    (saved.run.checkpoints / "trash-step-00000000.a000").write_text("a file")
    before = saved.names()
    assert retain(saved.run, 2) == []
    assert saved.names() == before
    assert (outside / "precious").exists()


def test_a_link_inside_a_folder_that_is_deleted_is_not_followed(saved) -> None:
    outside = saved.run.path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (saved.save(1).path / "extra").symlink_to(outside)
    saved.save_all(2, 3)
    assert retain(saved.run, 2) == names(1)
    assert (outside / "precious").exists()


def test_a_deletion_that_fails_is_told_and_leaves_nothing_half_there(saved, monkeypatch) -> None:
    saved.save_all(1, 2, 3)

    def refuse(path) -> None:
        raise PermissionError(13, os.strerror(13))

    with monkeypatch.context() as patch:
        patch.setattr(retain_module.shutil, "rmtree", refuse)
        with pytest.raises(RunFolderError, match="Permission denied"):
            retain(saved.run, 2)
    assert saved.names() == [*names(2, 3), f"trash-{names(1)[0]}"]
    retain(saved.run, 2)
    assert saved.names() == names(2, 3)
