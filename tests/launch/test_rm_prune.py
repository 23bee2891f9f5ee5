"""`muster rm` and `muster prune`: what they remove, and everything that they must leave alone."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.jobs.basics.errors import UsageError
from muster.jobs.runfolder.rundir import RunDir
from muster.launch.common import screen
from muster.launch.records.sizes import folder_bytes
from muster.launch.submit.claim import claimed
from muster.launch.submit.codestore import collect, share, store_of
from muster.launch.submit.pruning import age
from muster.launch.submit.removing import REMOVED
from muster.launch.sweeps.sweep import SweepPoint, SweepRecord
from support.users import VICTIM, muster_as, needs_root, public_folder

pytestmark = pytest.mark.command

OLD = "old-20250101T000000Z-000001"
NEW = "new-20250102T000000Z-000002"
SWEEP = "sweep-s-20250101T000000Z-00000a"


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_a_run_is_removed_by_part_of_its_name_and_what_its_links_point_at_stays(make_run, muster, tmp_path) -> None:
    outside = tmp_path / "mine"
    outside.mkdir()
    (outside / "precious").write_text("x")
    folder = make_run(OLD).submitted().ended()
    make_run(NEW).submitted().ended()
    (folder.run.path / "files").symlink_to(outside)
    (folder.run.path / "link").symlink_to(outside / "precious")
    code, out, _ = muster("rm", "old")
    assert (code, out.partition(" (")[0]) == (0, f"removed {OLD}")
    assert names(folder.root) == {NEW}
    assert (outside / "precious").read_text() == "x"


def test_a_part_that_fits_two_runs_removes_none(make_run, muster) -> None:
    root = make_run(OLD).submitted().ended().root
    make_run(NEW).submitted().ended()
    code, _, err = muster("rm", "2025")
    assert (code, names(root)) == (2, {OLD, NEW})
    assert "2 runs" in err


def test_a_dry_run_removes_nothing_and_says_what_it_would(make_run, muster, muster_json) -> None:
    root = make_run(OLD).submitted().ended().root
    assert muster("rm", OLD, "--dry-run")[1].startswith(f"would remove {OLD} (")
    assert muster("prune", "--keep", "0", "--dry-run")[2].startswith("muster: would remove 1 run, ")
    assert [row["run_id"] for row in muster_json("prune", "--keep", "0", "--dry-run")["removed"]] == [OLD]
    assert names(root) == {OLD}


def test_a_live_run_is_not_removed_nor_one_beside_it(make_run, muster) -> None:
    root = make_run(OLD).submitted().ended().root
    make_run(NEW).submitted().attempt().event("joined", 2.0)
    code, _, err = muster("rm", OLD, NEW)
    assert (code, names(root)) == (78, {OLD, NEW})
    assert err.startswith(f"muster: {NEW}: is running, so it was not removed; stop it first: muster stop {NEW}")
    assert muster("prune", "--keep", "0")[0] == 0
    assert names(root) == {NEW}


def test_a_run_elsewhere_that_may_be_alive_stays(make_run, muster) -> None:
    root = make_run(OLD).submitted(host="elsewhere").root
    assert muster("rm", OLD)[0] == 78
    assert muster("prune", "--keep", "0")[0] == 0
    assert names(root) == {OLD}


def test_a_run_with_a_process_on_this_host_stays_until_it_is_stopped(make_run, muster, start_process) -> None:
    root = make_run(OLD).submitted(alive=False).root
    start_process(OLD)
    code, _, err = muster("rm", OLD)
    assert (code, names(root)) == (78, {OLD})
    assert f"has processes on this host, so it was not removed; end them first: muster stop {OLD}" in err
    assert muster("stop", OLD)[0] == 0
    assert muster("rm", OLD)[0] == 0


def test_a_run_that_is_being_resumed_stays(make_run, muster) -> None:
    folder = make_run(OLD).submitted().ended()
    with claimed(folder.run):
        assert muster("rm", OLD)[0] == 78
        assert muster("prune", "--keep", "0")[0] == 78
    assert folder.run.events.exists()
    assert muster("rm", OLD)[0] == 0


@pytest.mark.parametrize("name", ["home", "project-2025"])
def test_a_folder_that_muster_did_not_name_stays_even_with_an_events_file(make_run, muster, name: str) -> None:
    folder = make_run(name).submitted().ended()
    code, _, err = muster("rm", str(folder.run.path))
    assert code == 78
    assert "is not named like a folder of Muster (NAME-TIME-ID), so it was not removed" in err
    muster("prune", "--keep", "0")
    assert folder.run.events.exists()


def test_a_folder_without_a_run_in_it_stays(make_run, muster) -> None:
    folder = make_run(OLD)
    folder.event("ended", code=0)
    code, _, err = muster("rm", OLD)
    assert (code, folder.run.events.exists()) == (78, True)
    assert "its events.jsonl has no record of a run" in err


def test_a_link_to_a_run_stays_and_so_does_the_run(make_run, muster, tmp_path) -> None:
    folder = make_run(OLD).submitted().ended()
    elsewhere = tmp_path / "archive"
    elsewhere.mkdir()
    folder.run.path.rename(elsewhere / OLD)
    folder.run.path.symlink_to(elsewhere / OLD)
    code, _, err = muster("rm", OLD)
    assert code == 78
    assert "is a link, so it was not removed; remove the link itself with rm" in err
    assert muster("prune", "--keep", "0")[0] == 78
    assert (elsewhere / OLD / "events.jsonl").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_the_run_of_another_user_stays(make_run, muster) -> None:
    folder = make_run(OLD).submitted().ended()
    os.chown(folder.run.path, 12345, 12345)
    assert muster("rm", OLD)[0] == 77
    assert muster("prune", "--keep", "0")[0] == 0
    assert folder.run.events.exists()


def test_an_interrupted_removal_is_completed_by_the_next_one(make_run, muster, tmp_path) -> None:
    root = make_run(OLD).submitted().ended().root
    half = make_run(NEW).submitted().ended().run.path
    half.rename(root / f"{REMOVED}{NEW}")
    (root / f"{REMOVED}link").symlink_to(tmp_path)
    assert muster("rm", OLD)[0] == 0
    assert names(root) == {f"{REMOVED}link"}


@needs_root
@pytest.mark.slow
def test_a_file_that_cannot_be_deleted_is_named_and_the_run_is_gone_from_the_list(make_run) -> None:
    made = make_run(OLD).submitted(alive=False).ended().run.path
    (made / "files" / "kept").mkdir(parents=True)
    (made / "files" / "kept" / "file").touch()
    with public_folder() as folder:
        runs = folder / "runs"
        runs.mkdir()
        shutil.move(made, runs)
        for path in (runs, *runs.rglob("*")):
            os.chown(path, VICTIM, VICTIM)
        (runs / OLD / "files" / "kept").chmod(0o500)
        said = f"{REMOVED}{OLD}: file: cannot be deleted: Permission denied; make it writable, then repeat the command"
        for words, code in ((("rm", OLD), 73), (("prune", "--keep", "0"), 0)):
            done = muster_as(VICTIM, *words, "--runs", str(runs), cwd=folder)
            assert done.returncode == code, done.stderr
            assert said in done.stderr
            assert names(runs) == {f"{REMOVED}{OLD}"}


def test_prune_needs_to_be_told_what_goes(make_run, muster) -> None:
    make_run(OLD).submitted().ended()
    assert muster("prune")[0] == 2
    assert muster("prune", "--state", "running")[0] == 2
    assert muster("prune", "--older-than", "month")[0] == 2


def test_prune_removes_by_age_state_and_number_together(make_run, muster) -> None:
    days = {"a": (40, "failed"), "b": (35, "done"), "c": (34, "failed"), "d": (33, "failed"), "e": (1, "failed")}
    for name, (old, state) in days.items():
        ended_s = time.time() - old * 86400 - 1735689600.0
        code = {"failed": 1, "done": 0}[state]
        root = make_run(f"{name}-20250101T000000Z-00000{name}").submitted().ended(ended_s, code=code, name=state).root
    code, out, _ = muster("prune", "--older-than", "30d", "--state", "failed", "--keep", "1")
    assert code == 0
    assert [line.split("-")[0] for line in out.splitlines()[1:]] == ["a", "c"]
    assert {name[0] for name in names(root)} == {"b", "d", "e"}


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("1.5h", 5400), ("30d", 2592000), ("2w", 1209600)])
def test_an_age_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert age(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1y", "nand", "1e9d", "99999999d"])
def test_any_other_age_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--older-than"):
        age(text)


# Sweeps ---------------------------------------------------------------------------------------------------------------


def make_sweep(*run_ids: str) -> Path:
    folder = Path(os.environ["MUSTER_RUNS"]) / SWEEP
    folder.mkdir(parents=True)
    points = tuple(SweepPoint(index, (f"nodes={index}",), f"p{index}") for index in range(len(run_ids)))
    SweepRecord("s", "job.yaml", "local", time.time(), points, run_ids).write(folder)
    return folder


def test_a_sweep_is_removed_with_its_runs(make_run, muster) -> None:
    folder = make_sweep(OLD, NEW)
    make_run(OLD).submitted().ended()
    make_run("other-20250101T000000Z-00000c").submitted().ended()
    assert muster("rm", SWEEP)[1].startswith(f"removed {SWEEP} and its 1 run (")
    assert names(folder.parent) == {"other-20250101T000000Z-00000c"}


def test_prune_leaves_the_runs_of_a_live_sweep_and_removes_the_folder_of_an_emptied_one(make_run, muster) -> None:
    folder = make_sweep(OLD)
    make_run(OLD).submitted().ended()
    with claimed(RunDir(folder)):
        assert muster("prune", "--keep", "0")[0] == 0
        assert names(folder.parent) == {OLD, SWEEP}
    assert muster("prune", "--keep", "0")[0] == 0
    assert names(folder.parent) == set()


# Sizes, and code that is stored once ----------------------------------------------------------------------------------


def test_list_shows_the_size_of_every_run(make_run, muster_json, muster) -> None:
    folder = make_run(OLD).submitted().ended()
    (folder.run.path / "deep").mkdir()
    (folder.run.path / "deep" / "file").write_bytes(bytes(5 << 20))
    (folder.run.path / "deep" / "link").symlink_to("/usr")
    assert muster_json("list")[0]["bytes"] == folder.run.events.stat().st_size + (5 << 20) + len("/usr")
    assert "5.0 MB" in muster("list")[1]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (7.9 * 2**20, "7.9 MB"), (2**50, "1024 TB")]
)
def test_sizes_are_short(nbytes: float, text: str) -> None:
    assert screen.size(nbytes) == text


def copies(root: Path, *names: str) -> list[Path]:
    """Make equal files in run folders, and share them."""
    made = [root / name / "code.py" for name in names]
    for path in made:
        path.parent.mkdir(parents=True)
        path.write_text("print(1)\n")
        share(root, [path])
    return made


def test_equal_files_of_two_runs_are_one_until_both_runs_are_gone(tmp_path: Path) -> None:
    first, second = copies(tmp_path, "a", "b")
    assert first.samefile(second)
    assert folder_bytes(first.parent) == round(9 / 3)
    first.unlink()
    assert collect(tmp_path) == 0
    second.unlink()
    assert collect(tmp_path) == 9
    assert not list(store_of(tmp_path).iterdir())


def test_other_contents_and_modes_are_other_files(tmp_path: Path) -> None:
    first, second, third = copies(tmp_path, "a", "b"), tmp_path / "c.py", tmp_path / "d.py"
    second.write_text("print(2)\n")
    third.write_text("print(1)\n")
    third.chmod(0o755)
    share(tmp_path, [second, third])
    assert {path.stat().st_nlink for path in (second, third)} == {2}
    assert (second.read_text(), third.stat().st_mode & 0o777) == ("print(2)\n", 0o755)
    assert first[0].stat().st_nlink == 3


def test_a_stored_file_that_was_edited_in_place_reaches_no_further_run(tmp_path: Path) -> None:
    first, second = copies(tmp_path, "a", "b")
    first.write_text("changed!\n")
    third, fourth = copies(tmp_path, "c", "d")
    assert second.read_text() == "changed!\n"  # the same file, which is why nothing of the user's is shared
    assert third.read_text() == fourth.read_text() == "print(1)\n"
    assert third.samefile(fourth)


@pytest.mark.parametrize("kind", ["link", "open"])
def test_a_store_that_others_can_change_is_not_used(tmp_path: Path, kind: str) -> None:
    store = store_of(tmp_path)
    if kind == "link":
        (tmp_path / "theirs").mkdir()
        store.symlink_to("theirs")
    else:
        store.mkdir()
        store.chmod(0o777)
    first, second = copies(tmp_path, "a", "b")
    assert not first.samefile(second)
    assert list(store.iterdir()) == []
    assert json.dumps(first.read_text()) == json.dumps(second.read_text())


# A real run -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_in_the_background_is_removed_after_it_was_stopped_and_not_before(muster, tmp_path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: sleep\ngrace_s: 1\ncommand: [sleep, '1000']\nranks_per_node: 2\n")
    words = [sys.executable, "-m", "muster", "submit", str(job), "--parsable", "--runs", str(tmp_path / "runs")]
    submitted = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert submitted.returncode == 0, submitted.stderr
    run_id = submitted.stdout.strip()
    assert muster("rm", run_id)[0] == 78
    assert muster("stop", run_id)[0] == 0
    assert muster("rm", run_id)[0] == 0
    assert names(tmp_path / "runs") == {store_of(tmp_path / "runs").name}
    assert not list(store_of(tmp_path / "runs").iterdir())
