"""Attacks by another user of the same machine on run folders, temporary folders and secrets; all of them must fail."""

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.files import append_line
from muster.jobs.node import rank_start
from muster.jobs.runfolder.rundir import RunDir
from muster.launch import supervise
from muster.launch.cli import main
from muster.launch.common import storage
from muster.launch.common.processes import start_ticks
from support.users import ATTACKER, VICTIM, command, give, muster_as, needs_root, public_folder, succeeds_as

pytestmark = [pytest.mark.command, needs_root, pytest.mark.ranks, pytest.mark.slow]

JOB = "name: hello\nnodes: 1\nranks_per_node: 1\ncommand: [sh, -c, '{}']\n"
NEWEST = "hello-20990101T000000.000Z-ffffff"
SECRET = "correct-horse-battery"


@pytest.fixture
def public() -> Iterator[Path]:
    with public_folder() as folder:
        yield folder


@pytest.fixture
def home(public: Path) -> Path:
    """A folder of the victim's own."""
    folder = public / "home"
    folder.mkdir(mode=0o700)
    os.chown(folder, VICTIM, VICTIM)
    return folder


@pytest.fixture(scope="module")
def failed_run() -> Iterator[Path]:
    """The folder of a run that has failed, so that it could be resumed."""
    with public_folder() as folder:
        (folder / "job.yaml").write_text(JOB.format("exit 3"))
        done = muster_as(0, "run", "job.yaml", "--runs", str(folder / "runs"), cwd=folder)
        assert done.returncode == 3, done.stderr
        yield next((folder / "runs").iterdir())


@pytest.fixture
def plant(public: Path, failed_run: Path) -> Callable[[int], RunDir]:
    """Return a function that plants the newest run of all; it runs a program of the attacker's when it is resumed."""

    def make(owner: int) -> RunDir:
        run = RunDir(public / "runs" / NEWEST)
        shutil.copytree(failed_run, run.path)
        run.path.parent.chmod(0o1777)
        program = public / "program"
        program.write_text(f"#!/bin/sh\ntouch {public}/ran-$(id -u)\n")
        program.chmod(0o755)
        record = json.loads(run.submission.read_text())
        record["python"] = str(program)
        run.submission.write_text(json.dumps(record))
        give(run.path, owner)
        return run

    return make


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the victim's that has nothing to do with Muster."""
    with subprocess.Popen(command(VICTIM, "sleep", "100")) as process:
        yield process
        process.kill()


# Run folders of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, VICTIM])
@pytest.mark.parametrize("words", [[], [NEWEST], ["2099"], ["runs/" + NEWEST]])
def test_a_planted_run_is_not_resumed(plant, public: Path, victim: int, words: list[str]) -> None:
    plant(ATTACKER)
    done = muster_as(victim, "resume", *words, "--runs", str(public / "runs"), cwd=public)
    assert done.returncode == (77 if words else 72)
    assert done.stderr.splitlines()[-1].startswith("muster: ")
    assert len(done.stderr.splitlines()) == (1 if words else 2)  # without a name, the warning of a folder left out
    assert f"belongs to user {ATTACKER}" in done.stderr or "skipped 1 run folder of other users" in done.stderr
    assert not list(public.glob("ran-*"))


def test_the_same_run_of_the_victims_own_is_resumed_so_the_attack_above_is_one(plant, public: Path) -> None:
    plant(VICTIM)
    muster_as(VICTIM, "resume", "--runs", str(public / "runs"), cwd=public)
    assert [path.name for path in public.glob("ran-*")] == [f"ran-{VICTIM}"]


LOOKS = ["list", "status", "logs", "why", "timeline", "memory", "profile", "stop", "resume", "bench-show"]


@pytest.mark.parametrize("name", [*LOOKS, "checkpoint-list"])
def test_no_command_takes_a_planted_run_for_the_newest_or_by_its_name(plant, public: Path, name: str) -> None:
    run = plant(ATTACKER)
    done = muster_as(VICTIM, *name.split("-"), "--runs", str(public / "runs"), cwd=public)
    assert (done.returncode, done.stdout) == (72, ""), done
    assert "skipped 1 run folder of other users" in done.stderr
    assert "no runs here" in done.stderr
    if name != "list":
        done = muster_as(VICTIM, *name.split("-"), str(run.path), "--runs", str(public / "runs"), cwd=public)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (77, "", 1), done
        assert f"{run.path}: belongs to user {ATTACKER}, expected {VICTIM} (you) or root" in done.stderr


def test_a_supervisor_refuses_the_folder_of_another_user(plant, public: Path) -> None:
    run = plant(ATTACKER)

    def refused() -> None:
        sys.argv[1:] = [str(run.path)]
        assert supervise.main() == 77

    assert succeeds_as(VICTIM, refused)
    assert not list(public.glob("ran-*"))


def test_a_run_of_ones_own_is_found_among_planted_ones(plant, public: Path, home: Path) -> None:
    plant(ATTACKER)
    (public / "job.yaml").write_text(JOB.format("echo mine"))
    done = muster_as(VICTIM, "run", "job.yaml", "--runs", str(public / "runs"), cwd=public)
    assert done.returncode == 0, done.stderr
    shown = muster_as(VICTIM, "list", "--json", "--runs", str(public / "runs"), cwd=public)
    (row,) = json.loads(shown.stdout)
    assert row["run_id"] != NEWEST
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("level", [0, 1])
def test_a_folder_below_that_of_a_stranger_is_not_used(public: Path, level: int) -> None:
    (public / "job.yaml").write_text(JOB.format("true"))
    theirs = public / "theirs"
    runs = theirs / "between" / "runs" if level else theirs / "runs"
    runs.mkdir(parents=True)
    for path in (runs, runs.parent):
        os.chown(path, VICTIM, VICTIM)
    words = ("run", "job.yaml", "--runs", str(runs))
    for group in (ATTACKER, VICTIM):
        os.chown(theirs, ATTACKER, group)  # mode 755: only the attacker can replace what is in it
        done = muster_as(VICTIM, *words, cwd=public)
        assert (done.returncode, done.stderr.count("\n")) == (77, 1)
        assert f"{theirs}: belongs to user {ATTACKER}, who can replace the folders in it; choose another" in done.stderr
        assert not [*runs.iterdir()]
    nobody = pwd.getpwnam("nobody")
    os.chown(theirs, nobody.pw_uid, nobody.pw_gid)
    for done in (muster_as(VICTIM, *words, cwd=public, gid=nobody.pw_gid), muster_as(0, *words, cwd=public)):
        assert done.returncode == 0  # a colleague of the group; in a container, root
        assert "who can replace the folders in it; to prevent that, choose another folder" in done.stderr


@pytest.mark.parametrize("words", [["list"], ["status"], ["bench", "show"], ["resume", NEWEST]])
@pytest.mark.parametrize("closed", ["run", "runs"])
def test_a_folder_that_is_closed_to_this_user_is_refused_in_one_line(plant, public, words, closed: str) -> None:
    run = plant(ATTACKER)
    folder = run.path if closed == "run" else run.path.parent
    os.chown(folder, ATTACKER, ATTACKER)
    folder.chmod(0o700)

    def muster() -> None:
        codes = [main([*words, "--runs", str(public / "runs")]), main(["bench", "show", str(run.path)])]
        assert codes == [72 if closed == "run" else 73, 2]  # a closed run is none that this user can see

    assert main([*words, "--runs", str(public / "none")]) in (2, 72)  # imports what a user may be unable to read
    assert main(["bench", "show", str(public / "none")]) == 2
    assert succeeds_as(VICTIM, muster)  # in a fork: what `muster_as` starts may be able to read anything


def test_a_runs_folder_that_everybody_can_replace_is_refused(plant, public: Path) -> None:
    plant(VICTIM).path.parent.chmod(0o777)
    done = muster_as(VICTIM, "resume", "--runs", str(public / "runs"), cwd=public)
    assert (done.returncode, len(done.stderr.splitlines())) == (77, 1)
    assert "every user can replace the folders in it" in done.stderr
    assert not list(public.glob("ran-*"))


# Processes ------------------------------------------------------------------------------------------------------------


def name_process(run: RunDir, pid: int, *, with_ticks: bool) -> None:
    now, ticks = time.time(), start_ticks(pid)
    here = {"host": socket.gethostname(), "time": now}
    append_line(run.events, {**here, "event": "submitted", "transport": "direct", "world_size": 1})
    row: dict[str, Any] = {**here, "event": "started", "attempt": 0, "node": 0, "ranks": [[0, pid]]}
    append_line(run.events, {**row, **({"ticks": [[0, ticks]]} if with_ticks else {})})


@pytest.mark.parametrize("words", [[], [NEWEST]])
def test_stopping_a_planted_run_ends_no_process(plant, public: Path, sleeper, words: list[str]) -> None:
    run = plant(ATTACKER)
    name_process(run, sleeper.pid, with_ticks=True)
    give(run.path, ATTACKER)
    done = muster_as(VICTIM, "stop", *words, "--runs", str(public / "runs"), cwd=public)
    assert done.returncode == (77 if words else 72)
    assert sleeper.poll() is None


@pytest.mark.parametrize("with_ticks", [True, False])
def test_a_row_of_ones_own_ends_the_process_that_it_names_by_ticks_alone(plant, public, sleeper, with_ticks) -> None:
    run = plant(VICTIM)
    name_process(run, sleeper.pid, with_ticks=with_ticks)
    give(run.path, VICTIM)
    done = muster_as(VICTIM, "stop", "--now", "--runs", str(public / "runs"), cwd=public)
    assert done.returncode == 0, done.stderr
    assert f"{int(with_ticks)} leftover process" in done.stdout
    assert (start_ticks(sleeper.pid) is None) == with_ticks


# Groups ---------------------------------------------------------------------------------------------------------------


def test_with_a_umask_of_002_the_group_can_neither_read_nor_replace_anything_of_a_run(home: Path) -> None:
    (home / "job.yaml").write_text(JOB.format("echo hi"))
    home.chmod(0o755)
    done = muster_as(VICTIM, "run", "job.yaml", "--runs", "runs", cwd=home, umask=0o002)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    run = RunDir(next((home / "runs").glob("[!.]*")))
    assert run.path.stat().st_mode & 0o7777 == 0o700
    assert run.job.is_file()
    assert not succeeds_as(ATTACKER, lambda: list(run.path.iterdir()), gid=VICTIM)
    assert not succeeds_as(ATTACKER, lambda: run.submission.rename(run.path / "moved"), gid=VICTIM)
    assert not succeeds_as(ATTACKER, lambda: run.path.rename(home / "runs" / "moved"), gid=VICTIM)


def old_run(plant: Callable[[int], RunDir]) -> RunDir:
    """Return a run of the victim's as it was made before, with a umask of 002."""
    run = plant(VICTIM)
    for each in (run.path, *run.path.rglob("*")):
        each.chmod(0o775 if each.is_dir() else 0o664)
    return run


def test_an_old_run_folder_that_its_group_can_write_is_listed_and_resumed_with_a_warning(plant, public: Path) -> None:
    run = old_run(plant)
    shown = muster_as(VICTIM, "list", "--json", "--runs", str(public / "runs"), cwd=public)
    assert [row["run_id"] for row in json.loads(shown.stdout)] == [NEWEST]
    assert shown.stderr == (
        f"muster: warning: {run.path}: its group may write in it; to prevent that, run: chmod -R g-w {run.path}\n"
    )
    muster_as(VICTIM, "resume", "--runs", str(public / "runs"), cwd=public)
    assert [path.name for path in public.glob("ran-*")] == [f"ran-{VICTIM}"]


@pytest.mark.parametrize("name", ["submission.json", "job.yaml"])
def test_a_file_that_the_group_has_replaced_in_an_old_run_folder_is_refused(plant, public, name: str) -> None:
    run = old_run(plant)

    def replace() -> None:
        path = run.path / name
        text = path.read_text()
        path.unlink()
        path.write_text(text)

    assert succeeds_as(ATTACKER, replace, gid=VICTIM)
    done = muster_as(VICTIM, "resume", "--runs", str(public / "runs"), cwd=public)
    assert done.returncode == 77, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"muster: {run.path / name}: belongs to user {ATTACKER}")
    assert not list(public.glob("ran-*"))


# Folders on nodes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def squatted(public: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The victim's usual temporary folder, made by the attacker, with links where ranks will write."""
    monkeypatch.setattr("tempfile.tempdir", str(public))
    folder = public / f"muster-{VICTIM}"
    attempt = RunDir(folder / "run-1").attempt(0)
    attempt.path.mkdir(parents=True)
    attempt.out(0).symlink_to(public / "precious")
    for each in (folder, *folder.rglob("*")):
        os.lchown(each, ATTACKER, ATTACKER)
        if not each.is_symlink():
            each.chmod(0o777)
    (public / "precious").write_text("of the victim")
    os.chown(public / "precious", VICTIM, VICTIM)
    (public / "file").touch()
    return folder


def test_a_temporary_folder_of_another_user_is_not_used(squatted: Path, public: Path) -> None:
    def work() -> None:
        found = storage.find(RunDir(public / "file" / "run-1"), "nonce")
        assert found["storage"] == "apart"
        assert not Path(found["run"]).is_relative_to(squatted)
        assert found == storage.find(RunDir(public / "file" / "run-1"), "nonce")  # of the next attempt as well
        for path in (Path(found["run"]), Path(found["run"]).parent):
            assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (VICTIM, 0o700)

    assert succeeds_as(VICTIM, work)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755])
def test_a_runs_own_path_below_a_folder_of_another_user_is_not_used(public: Path, mode: int, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(public))
    below = public / "theirs"
    below.mkdir()
    os.chown(below, ATTACKER, VICTIM)
    below.chmod(mode)

    def work() -> None:
        found = storage.find(RunDir(below / "runs" / "run-1"), "nonce")
        assert found["run"] == str(public / f"muster-{VICTIM}" / "run-1")

    assert succeeds_as(VICTIM, work)
    assert list(below.iterdir()) == []


def test_a_link_in_the_place_of_the_temporary_folder_is_not_followed(public: Path, home: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(public))
    link = public / f"muster-{VICTIM}"
    theirs = public / "theirs"
    theirs.mkdir(mode=0o777)
    link.symlink_to(theirs)
    os.lchown(link, ATTACKER, ATTACKER)
    os.chown(theirs, ATTACKER, ATTACKER)
    (public / "file").touch()

    def work() -> None:
        found = storage.find(RunDir(public / "file" / "run-1"), "nonce")
        assert found["storage"] == "apart"
        assert Path(found["run"]).parent.stat().st_uid == VICTIM

    assert succeeds_as(VICTIM, work)
    assert list(theirs.iterdir()) == []


def test_a_rank_does_not_append_its_output_to_what_a_link_points_at(squatted: Path, public: Path) -> None:
    out = RunDir(squatted / "run-1").attempt(0).out(0)

    def redirect() -> None:
        with pytest.raises(OSError, match="symbolic links"):
            rank_start._redirect(str(out), str(out))

    assert succeeds_as(VICTIM, redirect)
    assert (public / "precious").read_text() == "of the victim"


def test_a_nonce_of_another_user_does_not_make_a_folder_the_shared_one(plant, public: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(public))
    run = plant(ATTACKER)
    run.nonce("supervisor").write_text("nonce")
    run.path.chmod(0o777)

    def work() -> None:
        assert storage.find(run, "nonce")["storage"] == "apart"

    assert succeeds_as(VICTIM, work)


# Secrets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_no_other_user_can_read_a_secret_of_a_run(home: Path, umask: int) -> None:
    (home / "job.yaml").write_text(JOB.format("echo $TOKEN") + f"env: {{PASSWORD: {SECRET}}}\n")
    (home / ".env").write_text(SECRET)
    (home / ".env").chmod(0o600)
    runs = home.parent / "runs"
    runs.mkdir()
    os.chown(runs, VICTIM, VICTIM)
    words = ["submit", "job.yaml", "-x", f"TOKEN={SECRET}", "--runs", str(runs)]
    done = muster_as(VICTIM, *words, cwd=home, umask=umask)
    assert done.returncode == 0, done.stderr
    run = RunDir(next(runs.glob("[!.]*")))
    deadline = time.monotonic() + 30
    while not run.events.exists() or '"event": "ended"' not in run.events.read_text():
        assert time.monotonic() < deadline, run.supervisor_log.read_text()
        time.sleep(0.05)
    holding = [path for path in runs.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    names = {path.name for path in holding}
    assert {"job.yaml", "submission.json", ".env", "node-00.json", "rank-00000.out"} <= names
    for path in holding:
        copied = path.is_relative_to(run.code) and path.name == "job.yaml"  # as it is in the closed working folder
        assert path.stat().st_mode & 0o777 == (0o644 if copied else 0o600), path
        assert not succeeds_as(ATTACKER, path.read_bytes), path
    assert run.code.stat().st_mode & 0o777 == 0o700
    assert (run.code / "work").stat().st_mode & 0o777 == 0o700


# Sharing --------------------------------------------------------------------------------------------------------------

OWNER, COLLEAGUE, TEAM = 65534, 1, 65534  # nobody and daemon, whom every Linux knows; the team is nobody's own group


@pytest.fixture(scope="module")
def team() -> Iterator[Path]:
    """A run of `nobody`, who shares his runs with his group; the site file that says so stands beside it."""
    with public_folder() as public:
        (public / "site.yaml").write_text("share: group\n")
        (public / "job.yaml").write_text(JOB.format("echo shown; exit 3") + f"env: {{PASSWORD: {SECRET}}}\n")
        (public / "runs").mkdir(mode=0o1777)
        (public / "runs").chmod(0o1777)
        words = ["run", "job.yaml", "--site", "site.yaml", "--runs", str(public / "runs")]
        done = muster_as(OWNER, *words, cwd=public, gid=TEAM, umask=0o077)
        assert done.returncode == 3, done.stderr
        yield next((public / "runs").glob("[!.]*"))


def as_colleague(team: Path, *words: str, share: bool = True, gid: int = TEAM) -> subprocess.CompletedProcess[str]:
    public = team.parents[1]
    site = {"MUSTER_SITE": str(public / "site.yaml")} if share else {}
    return muster_as(COLLEAGUE, *words, "--runs", str(team.parent), cwd=public, gid=gid, **site)


def test_a_colleague_of_the_group_looks_at_a_shared_run(team: Path) -> None:
    for words in (["list"], ["status"], ["logs"], ["why"], ["status", team.name], ["why", str(team)]):
        done = as_colleague(team, *words)
        assert (done.returncode, done.stderr) == (0, ""), (words, done)
        assert {"logs": "shown", "list": "failed"}.get(words[0], "") in done.stdout


@pytest.mark.parametrize("name", ["resume", "stop", "checkpoint-list"])
def test_a_colleague_can_do_nothing_with_a_shared_run_but_look(team: Path, name: str) -> None:
    done = as_colleague(team, *name.split("-"), team.name)
    assert (done.returncode, done.stdout) == (77, "")
    assert f"belongs to user {OWNER}" in done.stderr


@pytest.mark.parametrize(("share", "gid"), [(False, TEAM), (True, COLLEAGUE)])
def test_who_does_not_share_or_is_not_of_the_group_sees_nothing_of_it(team: Path, share: bool, gid: int) -> None:
    assert as_colleague(team, "status", team.name, share=share, gid=gid).returncode == 77


def test_the_group_reads_logs_and_metrics_of_a_shared_run_but_no_secret_and_writes_nothing(team: Path) -> None:
    run = RunDir(team)
    for path in (run.events, run.attempts, run.attempt(0).out(0), run.attempt(0).node(0)):
        assert path.stat().st_mode & 0o777 == 0o640, path
        assert succeeds_as(COLLEAGUE, path.read_bytes, gid=TEAM), path
    for path in (run.job, run.site, run.submission, run.attempt(0).command(0)):
        assert not succeeds_as(COLLEAGUE, path.read_bytes, gid=TEAM), path
    for path in (team, *team.rglob("*")):
        assert path.stat().st_mode & 0o027 == 0, path
