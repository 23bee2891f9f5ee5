"""What of a working folder is code, what is only linked, and what is neither."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.launch.common import worktree
from muster.launch.common.worktree import Survey, heaviest_folder, survey
from support.worktrees import commit, git, repository, write


def test_in_a_work_tree_code_is_what_is_tracked_or_new_and_not_ignored(work: Path) -> None:
    repository(work, "data/\n*.log\n.venv\n")
    write(work, "train.py", "lib/model.py", "data/big.bin", "run.log", "lib/debug.log", ".venv/bin/python")
    git(work, "add", "train.py")
    write(work, "new.py")
    found = survey(work)
    assert found.by_git
    assert set(found.files) == {".gitignore", "train.py", "lib/model.py", "new.py"}
    assert sorted(found.links) == [".venv", "data", "lib/debug.log", "run.log"]
    assert found.notes == []


def test_a_deleted_file_and_a_folder_without_files_are_no_code(work: Path) -> None:
    repository(work)
    write(work, "gone.py", "stays.py")
    commit(work)
    (work / "gone.py").unlink()
    (work / "results").mkdir()
    found = survey(work)
    assert set(found.files) == {".gitignore", "stays.py"}
    assert found.links == ["results"]  # what a program writes there is the user's, not the copy's


def test_caches_and_git_s_own_folder_are_neither_code_nor_linked(work: Path) -> None:
    repository(work, "__pycache__/\n*.pyc\n.mypy_cache/\n")
    write(work, "a.py", "__pycache__/a.pyc", "lib/b.py", "lib/__pycache__/b.pyc", ".mypy_cache/x", "old.pyc")
    assert survey(work).links == []
    (work / ".git").rename(work.parent / "elsewhere")
    found = survey(work)
    assert (sorted(found.files), found.links) == ([".gitignore", "a.py", "lib/b.py"], [])


def test_only_what_is_below_the_working_folder_counts(work: Path) -> None:
    repository(work)
    write(work, "top.py", "sub/in.py", "sub/deep/er.py")
    assert set(survey(work / "sub").files) == {"in.py", "deep/er.py"}


def test_a_working_folder_that_git_ignores_as_a_whole_is_taken_as_it_is(work: Path) -> None:
    repository(work, "scratch/\n")
    write(work, "scratch/try.py")
    found = survey(work / "scratch")
    assert (list(found.files), found.by_git) == (["try.py"], False)


def test_repositories_inside_are_code_in_their_place(work: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    repository(library)
    write(library, "lib.py")
    commit(library)
    repository(work)
    git(work, "submodule", "--quiet", "add", str(library), "parts/library")
    git(work, "clone", "-q", str(library), "clone")
    write(work, "parts/library/new.py")
    found = survey(work)
    assert {"parts/library/lib.py", "parts/library/new.py", "clone/lib.py", ".gitmodules"} <= set(found.files)
    assert not any(".git/" in name or name.endswith("/.git") for name in [*found.files, *found.links])


def test_a_submodule_that_was_not_fetched_is_an_empty_folder(work: Path, tmp_path: Path) -> None:
    test_repositories_inside_are_code_in_their_place(work, tmp_path)
    git(work, "submodule", "--quiet", "deinit", "-f", "parts/library")
    assert not any(name.startswith("parts/") for name in survey(work).files)


def test_a_conflict_lists_its_file_once(work: Path) -> None:
    repository(work)
    write(work, "a.py", text="base\n")
    commit(work)
    git(work, "checkout", "-qb", "other")
    write(work, "a.py", text="other\n")
    commit(work)
    git(work, "checkout", "-q", "main")
    write(work, "a.py", text="main\n")
    commit(work)
    with pytest.raises(subprocess.CalledProcessError):
        git(work, "merge", "other")
    assert list(survey(work).files).count("a.py") == 1


HOSTILE = [
    b"with space.py",
    b"new\nline.py",
    b"quo'te\".py",
    b"-rf.py",
    b"\xff\xfe.py",
    "ümläut.py".encode(),
    b"$(id);.py",
]


@pytest.mark.parametrize("by_git", [True, False])
def test_names_may_be_any_bytes(work: Path, by_git: bool) -> None:
    if by_git:
        repository(work)
    write(work, *HOSTILE, *(b"sub folder/" + name for name in HOSTILE))
    names = {os.fsencode(name) for name in survey(work).files} - {b".gitignore"}
    assert names == {*HOSTILE, *(b"sub folder/" + name for name in HOSTILE)}


def test_symbolic_links_are_code_and_not_followed(work: Path, tmp_path: Path) -> None:
    write(tmp_path, "outside/data.bin", text="x" * 1000)
    for by_git in (False, True):
        if by_git:
            repository(work)
        else:
            (work / "out").symlink_to(tmp_path / "outside")
            (work / "loop").symlink_to(".")
            (work / "broken").symlink_to("nowhere")
        found = survey(work)
        assert {"out", "loop", "broken"} <= set(found.files)
        assert found.total_bytes < 1000


def test_without_git_all_files_count_but_hidden_folders_and_environments(work: Path) -> None:
    write(work, "a.py", "lib/b.py", ".hidden", ".git2/x", "env/pyvenv.cfg", "env/lib/big.so", "lib/conda/conda-meta/x")
    os.mkfifo(work / "pipe")
    found = survey(work)
    assert not found.by_git
    assert set(found.files) == {"a.py", "lib/b.py", ".hidden"}
    assert sorted(found.links) == [".git2", "env", "lib/conda"]


@pytest.mark.parametrize("by_git", [True, False])
def test_the_folder_of_runs_is_linked_wherever_it_is(work: Path, by_git: bool) -> None:
    if by_git:
        repository(work)
    write(work, "a.py", "runs/one/out.txt", "deep/out/two/out.txt", "deep/b.py")
    found = survey(work, [work / "runs", work / "deep" / "out", work.parent, Path("/elsewhere")])
    assert set(found.files) - {".gitignore"} == {"a.py", "deep/b.py"}
    assert sorted(found.links) == ["deep/out", "runs"]


def test_the_folder_of_runs_is_known_through_a_symbolic_link(work: Path) -> None:
    write(work, "a.py", "runs/one/out.txt")
    alias = work.parent / "alias"
    alias.symlink_to(work)
    assert list(survey(work, [alias / "runs"]).files) == ["a.py"]


def test_a_crowd_of_ignored_files_beside_one_tracked_is_a_folder_of_data(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worktree, "LINKS_EACH", 3)
    repository(work, "*.jpg\n")
    write(work, "data/README", *(f"data/{number}.jpg" for number in range(4)), "few/a.py", "few/1.jpg")
    found = survey(work)
    assert set(found.files) == {".gitignore", "few/a.py"}
    assert sorted(found.links) == ["data", "few/1.jpg"]
    assert found.notes == ["data: treated as data (4 ignored files in it), so linked, not copied"]


def test_a_repository_that_git_does_not_trust_counts_as_a_folder_and_says_so(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(work)
    write(work, "a.py")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setattr("muster.launch.common.gitfacts.KEPT", ("GIT_CONFIG", "GIT_TEST"))
    found = survey(work)
    assert not found.by_git
    assert "a.py" in found.files
    assert "detected dubious ownership" in found.notes[0]


def test_without_git_installed_a_folder_is_a_folder(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(work)
    write(work, "a.py")
    monkeypatch.setenv("PATH", str(work))
    found = survey(work)
    assert (sorted(found.files), found.notes) == ([".gitignore", "a.py"], [])


def test_git_variables_of_a_hook_do_not_lead_elsewhere(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(work)
    write(work, "a.py")
    monkeypatch.setenv("GIT_DIR", "/nowhere/.git")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert survey(work).by_git


def test_a_folder_that_may_not_be_read_is_left_out_and_named(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work, "a.py", "closed/b.py")
    scandir = os.scandir

    def refuse(path: object) -> object:
        if str(path).endswith("closed/"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", lambda path: refuse(f"{path}/"))
    found = survey(work)
    assert list(found.files) == ["a.py"]
    assert found.notes == ["closed: skipped, because it cannot be read: Permission denied"]


def test_a_walk_through_a_whole_disk_is_given_up(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree, "WALK_FILES", 5)
    write(work, *(f"{number}.txt" for number in range(20)))
    found = survey(work)
    assert not found.complete
    assert len(found.files) == 5


@pytest.mark.parametrize(
    ("weights", "folder"),
    [
        ({"a": 5}, "."),
        ({"a/b/c": 5, "a/d": 1}, "a/b"),
        ({"a/b": 5, "c/d": 5}, "."),
        ({"a/b/c": 4, "a/d/e": 4, "f": 1}, "a"),
        ({}, "."),
    ],
)
def test_the_heaviest_folder_is_the_deepest_that_holds_more_than_half(weights: dict[str, int], folder: str) -> None:
    assert heaviest_folder(weights) == folder


paths = st.lists(st.sampled_from(["a", "b", "cc", "d e"]), min_size=1, max_size=4).map("/".join)


@given(st.dictionaries(paths, st.integers(0, 100)))
def test_the_heaviest_folder_holds_more_than_half_or_is_the_whole(weights: dict[str, int]) -> None:
    folder = heaviest_folder(weights)
    inside = sum(weight for name, weight in weights.items() if name.startswith(f"{folder}/"))
    assert folder == "." or inside * 2 > sum(weights.values())


def test_sizes_are_added_up(work: Path) -> None:
    write(work, "a", "b", text="12345")
    assert Survey(work).total_bytes == 0
    assert survey(work).total_bytes == 10
