"""Which folders are used, and which are refused; other users are played by files that are given to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.basics import files, ownership
from muster.jobs.basics.errors import RunFolderError
from muster.jobs.basics.ownership import check_folder, check_parents, private_folder
from muster.jobs.basics.reading import UntrustedError
from muster.jobs.runfolder import rundir
from muster.jobs.runfolder.rundir import RunDir
from support.users import ATTACKER, needs_root

EVERY_UMASK = [0o000, 0o002, 0o022, 0o077]


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_warned", set())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = rundir.new_run(tmp_path / "runs", "job")
    files.append_line(made.events, {"event": "submitted"})
    return made


@pytest.fixture
def umask(request: pytest.FixtureRequest):
    usual = os.umask(request.param)
    yield request.param
    os.umask(usual)


@pytest.mark.parametrize("umask", EVERY_UMASK, indirect=True)
@pytest.mark.parametrize(("shared", "folder", "file"), [(False, 0o700, 0o600), (True, 0o750, 0o640)])
def test_the_modes_of_a_run_do_not_depend_on_the_umask(tmp_path: Path, umask, shared, folder: int, file: int) -> None:
    run = RunDir(tmp_path / "runs" / "run-1")
    rundir.make_run(run, shared=shared)
    attempt = run.attempt(0)
    attempt.make()
    files.append_line(run.events, {"event": "submitted"})
    files.write_json(attempt.placement, {})
    files.write_json(attempt.command(0), {})
    files.write_secret(run.job, "name: job\n")
    modes = [path.stat().st_mode & 0o777 for path in (run.path, attempt.path, attempt.commands)]
    assert modes == [folder, folder, 0o700]
    modes = [path.stat().st_mode & 0o777 for path in (run.events, attempt.placement, attempt.command(0), run.job)]
    assert modes == [file, file, 0o600, 0o600]
    assert run.path.parent.stat().st_mode & 0o022 == 0
    check_folder(run.path)


def test_a_file_system_that_gives_new_folders_to_somebody_else_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    with pytest.raises(RunFolderError, match=r"new folders .* belong to user \d+ .* expected user 4711 \(you\)"):
        rundir.make_run(RunDir(tmp_path / "run-1"))
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_folders_and_links_of_another_user_are_refused_and_left_out_of_lists(run: RunDir, capsys) -> None:
    root, elsewhere = run.path.parent, run.path.parents[1] / "elsewhere"
    strange = root / "strange-20990101T000000Z-ffffff"
    strange.mkdir()
    (strange / "events.jsonl").touch()
    os.chown(strange, ATTACKER, ATTACKER)
    elsewhere.mkdir()
    (elsewhere / "events.jsonl").touch()
    link = root / "link-20990102T000000Z-ffffff"
    link.symlink_to(elsewhere)
    os.lchown(link, ATTACKER, ATTACKER)
    assert rundir.list_runs(root) == rundir.list_runs(root) == [run]
    assert rundir.find_run(root, None) == run
    assert capsys.readouterr().err == (
        f"muster: warning: {root}: skipped 2 run folders of other users; to see why, name one in a command\n"
    )
    for given in ("strange", strange.name, str(strange), "link", str(link)):
        with pytest.raises(UntrustedError, match=f"belongs to user {ATTACKER}, expected 0"):
            rundir.find_run(root, given)
    os.lchown(link, 0, 0)
    assert rundir.find_run(root, link.name).path == link


def test_a_run_folder_that_everybody_can_write_is_refused(run: RunDir) -> None:
    run.path.chmod(0o777)
    with pytest.raises(UntrustedError, match=f"every user may write in this folder, .*: chmod o-w {run.path}"):
        rundir.find_run(run.path.parent, run.run_id)
    with pytest.raises(RunFolderError, match="no runs here"):
        rundir.find_run(run.path.parent, None)


def test_the_path_in_a_suggested_command_is_quoted(tmp_path: Path) -> None:
    run = rundir.new_run(tmp_path / "my runs", "j")
    run.events.touch()
    run.path.chmod(0o777)
    with pytest.raises(UntrustedError, match=f": chmod o-w '{run.path}'"):
        rundir.open_run(run.path)


def test_of_a_folder_that_its_group_can_write_is_warned_once(run: RunDir, capsys) -> None:
    run.path.chmod(0o775)
    run.path.parent.chmod(0o775)
    assert rundir.find_run(run.path.parent, None) == rundir.find_run(run.path.parent, str(run.path)) == run
    assert capsys.readouterr().err == (
        f"muster: warning: {run.path.parent}: its group can replace the runs in it; "
        f"to prevent that, run: chmod g-w {run.path.parent}\n"
        f"muster: warning: {run.path}: its group may write in it; to prevent that, run: chmod -R g-w {run.path}\n"
    )


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o1777, False), (0o775, False), (0o755, False)])
@pytest.mark.parametrize("level", [0, 1])
def test_above_a_run_only_world_writable_folders_without_the_sticky_bit_are_refused(
    run: RunDir, mode: int, refused: bool, level: int
) -> None:
    parent = run.path.parents[level]
    parent.chmod(mode)
    for use in (lambda: check_parents(run.path), lambda: rundir.make_run(RunDir(run.path.with_name("new")))):
        if refused:
            with pytest.raises(UntrustedError, match=f"{parent}: every user can replace the folders in it"):
                use()
        else:
            use()


@needs_root
def test_a_private_folder_is_made_below_nobody_elses(tmp_path: Path) -> None:
    private_folder(tmp_path / "a" / "b")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700, 0o700]
    private_folder(tmp_path / "a" / "b")
    os.chown(tmp_path / "a", ATTACKER, 0)
    with pytest.raises(UntrustedError, match=f"belongs to user {ATTACKER}"):
        private_folder(tmp_path / "a" / "b" / "c")


@pytest.mark.parametrize(
    ("mode", "of", "refused"),
    [(0o770, "last", True), (0o702, "last", True), (0o770, "above", False), (0o777, "above", True)],
)
def test_a_private_folder_is_writable_by_nobody_else(tmp_path: Path, mode: int, of: str, refused: bool) -> None:
    last = tmp_path / "a" / "b"
    private_folder(last)
    (last if of == "last" else last.parent).chmod(mode)
    if refused:
        with pytest.raises(UntrustedError, match="other users may write in it"):
            private_folder(last)
    else:
        private_folder(last)


def test_logs_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "log").symlink_to(tmp_path / "precious")
    with pytest.raises(RunFolderError, match="symbolic links"):
        files.append_line(tmp_path / "log", {"a": 1})
    assert (tmp_path / "precious").read_text() == "precious"


def test_looking_ends_with_the_command(tmp_path: Path) -> None:
    """Nothing that one command may read is read by a later one of the same process."""
    code = "from muster.launch.cli import main; from muster.jobs.basics import reading, ownership; "
    code += "main(['list', '--runs', 'x']); "
    code += "assert not reading._extra_owners.get(); assert ownership._shares.get() is None"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, check=True)
