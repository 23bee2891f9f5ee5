"""The code as it was submitted: whole, with nothing beside it, and out of reach of later edits."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.jobs.basics.boot import CODE_ROOT, module_argv
from muster.jobs.basics.errors import RefusedError, RunFolderError, StorageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import gitfacts
from muster.launch.common.fingerprint import fingerprint
from muster.launch.submit import snapshot
from muster.launch.submit.codestore import store_of
from muster.launch.submit.snapshot import CodeSnapshot, moved_link, take
from support.worktrees import commit, git, repository, write

pytestmark = [pytest.mark.command, pytest.mark.slow]


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Muster's own code be two files where the user's is the subject: a copy costs 0.3 s of CPU time less."""
    write(tmp_path, "little/muster/__init__.py", "little/muster/launch/boot.py")
    monkeypatch.setattr(snapshot, "CODE_ROOT", tmp_path / "little")


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> RunDir:
    if not hasattr(request, "param"):
        request.getfixturevalue("little")
    folder = RunDir(tmp_path / "runs" / "a-run")
    folder.path.mkdir(parents=True)
    return folder


WHOLE = pytest.mark.parametrize("run", ["whole"], indirect=True)


def record(run: RunDir) -> Any:
    return json.loads((run.code / "code.json").read_text())


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


# Muster's own code ----------------------------------------------------------------------------------------------------


@WHOLE
def test_muster_s_own_packages_alone_are_copied_whole_and_agents_start_there(run: RunDir, work: Path) -> None:
    taken = take(run, workdir=work, program=False)
    assert taken == CodeSnapshot(run.code, work)
    assert fingerprint(str(taken.code)) == fingerprint()
    assert (taken.code / "muster" / "jobs" / "train" / "data" / "digits").is_dir()
    assert {path.name for path in taken.code.iterdir()} == {"muster", "code.json"}
    assert not [path for path in (taken.code / "muster").iterdir() if path.is_symlink()]
    assert not [name for name in names(taken.code) if "__pycache__" in name]
    assert not (run.code / "work").exists()
    found = record(run)
    assert (found["muster"]["from"], found["muster"]["fingerprint"], found["work"]) == (
        *(str(CODE_ROOT), fingerprint()),
        None,
    )
    (taken.code / "muster" / "launch" / "where.py").write_text(
        "from muster.jobs.basics import errors; print(errors.__file__)\n"
    )
    argv = module_argv(sys.executable, "muster.launch.where", str(taken.code))
    said = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    assert said == f"{taken.code}/muster/jobs/basics/errors.py"


@WHOLE
def test_two_runs_have_one_copy_of_our_code_and_each_its_own_of_the_users(run: RunDir, work: Path) -> None:
    write(work, "train.py")
    other = RunDir(run.path.parent / "other-run")
    other.path.mkdir()
    first, second = (take(each, workdir=work, program=True) for each in (run, other))
    own = [path for path in (first.code / "muster").rglob("*") if path.is_file()]
    assert own
    assert all(path.samefile(second.code / path.relative_to(first.code)) for path in own)
    assert not (first.workdir / "train.py").samefile(second.workdir / "train.py")
    shutil.rmtree(run.path)
    assert fingerprint(str(second.code)) == fingerprint()


@WHOLE
def test_an_installed_muster_is_not_taken_for_the_repository_around_it(
    run: RunDir, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(work, "site/\n")
    write(work, "a.py")
    commit(work)
    shutil.copytree(
        CODE_ROOT / "muster", work / "site" / "muster", ignore=shutil.ignore_patterns("__pycache__", "data")
    )
    monkeypatch.setattr(snapshot, "CODE_ROOT", work / "site")
    take(run, workdir=work, program=False)
    assert record(run)["muster"]["origin"] is None


# The user's -----------------------------------------------------------------------------------------------------------


def test_what_was_submitted_stays_whatever_happens_to_the_original(run: RunDir, work: Path) -> None:
    repository(work, "data/\n")
    write(work, "train.py", "lib/model.py", "lib/gone.py", "data/set.bin", text="old")
    commit(work)
    taken = take(run, workdir=work, program=True)
    with (work / "train.py").open("r+") as file:  # in place, as some editors and `sed -i -c` do
        file.write("new")
    (work / "lib" / "model.py").unlink()
    write(work, "lib/model.py", "lib/new.py", "data/set.bin", text="new")
    shutil.rmtree(work / ".git")
    (work / "lib" / "gone.py").unlink()
    assert taken.workdir == run.code / "work"
    assert names(taken.workdir) == {".gitignore", "train.py", "lib/model.py", "lib/gone.py", "data"}
    for name in ("train.py", "lib/model.py", "lib/gone.py"):
        assert (taken.workdir / name).read_text() == "old"
        assert (taken.workdir / name).stat().st_nlink == 1
    assert (taken.workdir / "data" / "set.bin").read_text() == "new"  # no code: a link to the user's own


def test_a_program_runs_from_the_copy_and_its_results_reach_the_user(run: RunDir, work: Path) -> None:
    repository(work, "results/\n")
    write(work, "part.py", text="word = 'first'\n")
    write(work, "train.py", text="import part; open('results/said', 'w').write(part.word)\n")
    write(work, "results/.keep")
    taken = take(run, workdir=work, program=True)
    write(work, "part.py", text="word = 'second'\n")
    subprocess.run([sys.executable, "train.py"], cwd=taken.workdir, check=True)
    assert (work / "results" / "said").read_text() == "first"


def test_the_commit_and_what_differs_from_it_are_recorded(run: RunDir, work: Path) -> None:
    repository(work)
    write(work, "a.py", text="one\n")
    made = commit(work)
    write(work, "a.py", text="two\n")
    write(work, "new.py")
    take(run, workdir=work, program=True)
    found = record(run)["work"]
    assert (found["origin"]["commit"], found["origin"]["branch"], found["origin"]["cut"]) == (made, "main", False)
    assert "-one\n+two\n" in found["origin"]["diff"]
    assert found["files"] == [".gitignore", "a.py", "new.py"]
    assert found["from"] == str(work)
    git(work, "checkout", "-q", "--", "a.py")
    (work / "patch").write_text(found["origin"]["diff"])
    git(work, "apply", "patch")  # the state that was submitted can be had again
    assert (work / "a.py").read_text() == "two\n"


@pytest.mark.usefixtures("little")
def test_without_a_commit_or_a_branch_the_record_says_so(work: Path, tmp_path: Path) -> None:
    repository(work)
    write(work, "a.py")
    for number, wanted in enumerate([None, "main", "detached"]):
        run = RunDir(tmp_path / "runs" / str(number))
        run.path.mkdir(parents=True)
        if wanted == "main":
            commit(work)
        elif wanted == "detached":
            git(work, "checkout", "-q", "--detach")
        take(run, workdir=work, program=True)
        origin = record(run)["work"]["origin"]
        assert (origin is None) == (wanted is None)
        assert origin is None or origin["branch"] == (wanted if wanted == "main" else None)


def test_a_long_diff_is_cut(run: RunDir, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.launch.common.gitfacts.DIFF_BYTES", 100)
    repository(work)
    write(work, "a.py")
    commit(work)
    write(work, "a.py", text="long line\n" * 1000)
    take(run, workdir=work, program=True)
    origin = record(run)["work"]["origin"]
    assert (len(origin["diff"]), origin["cut"]) == (100, True)


def test_names_of_any_bytes_modes_and_times_are_kept(run: RunDir, work: Path) -> None:
    hostile = [b"new\nline", b"\xff\xfe", b"-rf", b"a b/c'd", "ü/ö".encode()]
    write(work, *hostile, b"run.sh")
    (work / "run.sh").chmod(0o750)
    os.utime(work / "run.sh", (1_000_000_000, 1_000_000_000))
    taken = take(run, workdir=work, program=True)
    for name in hostile:
        assert Path(os.fsdecode(os.fsencode(taken.workdir) + b"/" + name)).read_text() == "x"
    copied = (taken.workdir / "run.sh").stat()
    assert (copied.st_mode & 0o777, copied.st_mtime) == (0o750, 1_000_000_000)
    assert {os.fsencode(name) for name in record(run)["work"]["files"]} == {*hostile, b"run.sh"}


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_others_can_enter_no_folder_of_the_copy_and_files_are_no_more_open_than_their_sources(
    run: RunDir, work: Path, umask: int
) -> None:
    write(work, "a/b/c/deep.py", ".env")
    (work / ".env").chmod(0o600)
    (work / "a" / "b" / "c" / "deep.py").chmod(0o644)
    usual = os.umask(umask)
    try:
        taken = take(run, workdir=work, program=True)
        assert os.umask(umask) == umask
    finally:
        os.umask(usual)
    folders = [run.code, *(path for path in run.code.rglob("*") if path.is_dir() and not path.is_symlink())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    modes = [(taken.workdir / name).stat().st_mode & 0o777 for name in (".env", "a/b/c/deep.py")]
    assert modes == [0o600, 0o644]


def test_a_file_that_only_others_may_write_can_be_taken_away_again(run: RunDir, work: Path) -> None:
    write(work, "closed.py")
    (work / "closed.py").chmod(0o444)
    taken = take(run, workdir=work, program=True)
    assert (taken.workdir / "closed.py").stat().st_mode & 0o777 == 0o644


@pytest.mark.usefixtures("little")
def test_the_runs_are_linked_not_copied_also_when_they_lie_in_the_working_folder_itself(work: Path) -> None:
    write(work, "a.py", "old-run/events.jsonl", "old-run/big.out")
    for root in (work / "runs", work):
        run = RunDir(root / "this-run")
        run.path.mkdir(parents=True)
        taken = take(run, workdir=work, program=True)
        inside = names(taken.workdir)
        assert "a.py" in inside
        assert not [name for name in inside if name.startswith(("runs/", "this-run/"))]
        shutil.rmtree(root / "this-run")
        shutil.rmtree(store_of(root))
    assert not [name for name in inside if name.startswith("old-run/")]


# Symbolic links -------------------------------------------------------------------------------------------------------


def test_links_stay_links_and_lead_into_the_copy_or_where_they_led(run: RunDir, work: Path) -> None:
    write(work, "lib/code.py", text="old")
    write(work.parent, "shared/data", text="data")
    (work / "inside").symlink_to("lib/code.py")
    (work / "absolute").symlink_to(work / "lib" / "code.py")
    (work / "lib" / "deep").symlink_to(work / "lib")
    (work / "outside").symlink_to("../shared")
    (work / "lib" / "outside").symlink_to("../../shared/data")
    (work / "broken").symlink_to("nowhere")
    taken = take(run, workdir=work, program=True).workdir
    write(work, "lib/code.py", text="new")
    assert all((taken / name).is_symlink() for name in ("inside", "absolute", "outside", "broken", "lib/deep"))
    assert (taken / "inside").read_text() == (taken / "absolute").read_text() == "old"
    assert (taken / "lib" / "deep" / "code.py").read_text() == "old"
    assert (taken / "outside" / "data").read_text() == (taken / "lib" / "outside").read_text() == "data"
    assert str((taken / "broken").readlink()) == "nowhere"


parts = st.lists(st.sampled_from(["a", "b", ".."]), min_size=1, max_size=5).map("/".join)


@given(name=parts.map(lambda text: text.replace("..", "c")), pointed=parts, absolute=st.booleans())
def test_a_moved_link_means_the_same_place_in_the_copy(name: str, pointed: str, absolute: bool) -> None:
    source, target = Path("/home/me/work"), Path("/runs/r/code/work")
    pointed = f"{source}/{pointed}" if absolute else pointed
    meant = os.path.normpath(source / Path(name).parent / pointed)
    now = os.path.normpath(target / Path(name).parent / moved_link(source, name, pointed))
    inside = not os.path.relpath(meant, source).startswith("..")
    assert now == (str(target / os.path.relpath(meant, source)) if inside else meant) or meant == str(source)


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_too_much_to_be_code_is_refused_with_where_most_of_it_lies(
    run: RunDir, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(snapshot, "MOST_FILES", 50)
    write(work, "a.py")
    write(work, "sets/train/big", text="x" * (3 << 20))
    with pytest.raises(RefusedError) as caught:
        take(run, workdir=work, program=True)
    assert str(caught.value) == (
        f"{work}: 2 files of 3.0 MB, too much to copy as code (at most 50 files, 1.0 MB); most of it is in "
        "sets/train: 1 file of 3.0 MB; make this a git repository and list it in .gitignore, so that it is linked; or "
        "run without a copy: --no-snapshot"
    )
    assert not run.code.exists()
    repository(work, "sets/\n")
    assert take(run, workdir=work, program=True).workdir.is_dir()
    shutil.rmtree(run.code)
    write(work, *(f"many/{number}" for number in range(60)))
    with pytest.raises(
        RefusedError, match=r"62 files of .*most of it is in many: 60 files of .*; list it in .gitignore,"
    ):
        take(run, workdir=work, program=True)


def test_files_that_vanish_or_change_while_copying_are_no_error(
    run: RunDir, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, "a.py", "gone.py", "folder/gone.py", "became-folder", "became-socket")
    surveyed = snapshot.survey

    def survey_then_change(*arguments: Any) -> Any:
        found = surveyed(*arguments)
        (work / "gone.py").unlink()
        shutil.rmtree(work / "folder")
        (work / "became-folder").unlink()
        (work / "became-folder").mkdir()
        (work / "became-socket").unlink()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(work / "became-socket"))
        return found

    monkeypatch.setattr(snapshot, "survey", survey_then_change)
    taken = take(run, workdir=work, program=True)
    assert (names(taken.workdir), taken.notes) == ({"a.py"}, ())


def test_a_file_that_cannot_be_read_is_left_out_and_named(
    run: RunDir, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(work, "a.py", "secret")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == work / "secret":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    taken = take(run, workdir=work, program=True)
    assert taken.notes == ("secret: skipped, because it cannot be read: Permission denied",)
    assert names(taken.workdir) == {"a.py"}


@pytest.mark.parametrize(
    ("number", "expected"), [(errno.ENOSPC, StorageError), (errno.EDQUOT, StorageError), (errno.EROFS, RunFolderError)]
)
def test_a_full_disk_leaves_no_half_copy(
    run: RunDir, work: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(expected, match="--runs DIR"):
        take(run, workdir=work, program=True)
    assert not run.code.exists()


def test_a_word_of_the_argv_that_leads_past_the_copy_is_named(run: RunDir, work: Path) -> None:
    write(work, "train.py", ".venv/bin/python")
    argv = [f"{work}/.venv/bin/python", f"{work}/train.py", "train.py", "--out", f"{work}/out", "/etc/hosts"]
    taken = take(run, workdir=work, program=True, argv=argv)
    assert taken.notes == (
        f"{work}/train.py: is outside the copy, so later edits affect the run; use a relative path: train.py",
    )


def test_git_runs_no_program_that_the_repository_names(work: Path, tmp_path: Path) -> None:
    repository(work)
    write(work, "a.py")
    commit(work)
    program, ran, hooks = tmp_path / "program", tmp_path / "ran", tmp_path / "hooks"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    hooks.mkdir()
    shutil.copy(program, hooks / "post-index-change")
    write(work, "a.py", text="changed\n")
    write(work, ".gitattributes", text="*.py diff=x\n")
    for name in ("core.fsmonitor", "diff.external", "core.pager", "diff.x.textconv", "diff.x.command"):
        git(work, "config", name, str(program))
    git(work, "config", "core.hooksPath", str(hooks))
    git(work, "status")
    assert ran.exists()  # the settings do work
    ran.unlink()
    found = gitfacts.origin(work)
    assert found is not None
    assert "changed" in found["diff"]
    assert "a.py" in gitfacts.names(work, "-c", "-o", "-m")
    assert gitfacts.holds(work)
    assert gitfacts.short_commit(work, "a.py", deadline_s=60.0).endswith("+")
    assert not ran.exists()
