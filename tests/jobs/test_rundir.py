"""The run folder: paths, whole writes, lines that are never torn, and finding a run again."""

import errno
import json
import os
from pathlib import Path

import pytest

from muster.jobs.basics import files
from muster.jobs.basics.errors import NotFoundError, RunFolderError, StorageError, UsageError
from muster.jobs.runfolder import rundir
from muster.jobs.runfolder.rundir import RunDir


def a_run(root: Path, run_id: str) -> RunDir:
    run = RunDir(root / run_id)
    run.path.mkdir(parents=True)
    files.append_line(run.events, {"event": "submitted"})
    return run


def test_the_paths_are_those_that_design_draws() -> None:
    run = RunDir(Path("/runs/j"))
    attempt = run.attempt(7)
    paths = [run.job, run.site, run.attempts, run.events, run.metrics, attempt.placement, attempt.node(1)]
    paths += [attempt.out(3), attempt.err(3), attempt.metrics(3), attempt.command(12)]
    assert [str(path.relative_to("/runs/j")) for path in paths] == [
        "job.yaml",
        "site.yaml",
        "attempts.jsonl",
        "events.jsonl",
        "metrics.jsonl",
        "attempt-007/placement.json",
        "attempt-007/node-01.json",
        "attempt-007/rank-00003.out",
        "attempt-007/rank-00003.err",
        "attempt-007/metrics-00003.jsonl",
        "attempt-007/commands/node-12.json",
    ]


def test_a_new_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = {rundir.new_run(tmp_path / "deep" / "runs", "job").run_id for _ in range(5)}
    assert len(runs) == 5
    assert {entry.name for entry in (tmp_path / "deep" / "runs").iterdir()} == runs


def test_the_folder_of_runs_is_the_given_one_then_the_variables_then_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_RUNS", "/scratch")
    assert rundir.runs_root("here") == tmp_path / "here"
    assert rundir.runs_root(None) == Path("/scratch")
    monkeypatch.delenv("MUSTER_RUNS")
    assert rundir.runs_root(None) == tmp_path / "runs"


def test_a_file_in_the_place_of_the_folder_is_told_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"cannot write here: .*; choose another folder with --runs DIR"):
        rundir.new_run(tmp_path / "runs", "job")


def test_runs_are_found_by_id_by_part_by_path_and_the_newest_by_nothing(tmp_path: Path) -> None:
    old = a_run(tmp_path, "b-20250101T000000Z-aaaaaa")
    new = a_run(tmp_path, "a-20250102T000000Z-bbbbbb")
    (tmp_path / "not-a-run").mkdir()
    assert rundir.list_runs(tmp_path) == [old, new]
    assert rundir.find_run(tmp_path, None) == new
    assert rundir.find_run(tmp_path, old.run_id) == old
    assert rundir.find_run(tmp_path, "aaaaaa") == old
    assert rundir.find_run(tmp_path / "elsewhere", str(old.path)) == old


@pytest.mark.parametrize("name", ["$(id)-20250102T000000Z-bbbbbb", "a b", "-x", "\x1b[2J", "j\uff11", "a;id", "j\n"])
def test_a_folder_whose_name_no_run_can_have_is_no_run(tmp_path: Path, name: str) -> None:
    """A run's id stands in commands that messages print for the user to paste."""
    run = a_run(tmp_path, "j-20250101T000000Z-aaaaaa")
    other = a_run(tmp_path, name)
    assert rundir.list_runs(tmp_path) == [run]
    assert rundir.find_run(tmp_path, None) == run
    with pytest.raises(RunFolderError, match="the name of a run may have only letters, digits"):
        rundir.find_run(tmp_path, str(other.path))


def test_a_run_is_found_by_a_path_with_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path, "j-20250101T000000Z-aaaaaa")
    run.attempt(0).path.mkdir()
    monkeypatch.chdir(run.attempt(0).path)
    assert rundir.find_run(tmp_path, "..") == run


def test_of_several_runs_that_a_name_fits_the_newest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path, "k-20250101T000000Z-bbbbbb")
    newest = a_run(tmp_path, "j-20250102T000000Z-aaaaaa")
    assert rundir.find_run(tmp_path, "2025") == newest
    assert capsys.readouterr().err == "muster: '2025' matches 2 runs; using the newest, j-20250102T000000Z-aaaaaa\n"
    assert rundir.find_run(tmp_path, "j-") == newest
    assert capsys.readouterr().err == ""


def test_a_command_for_a_run_finds_it_when_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "my runs" / "j-1")
    monkeypatch.chdir(tmp_path)
    assert run.command("logs -f") == f"muster logs -f j-1 --runs '{tmp_path}/my runs'"
    assert run.command("list", named=False) == f"muster list --runs '{tmp_path}/my runs'"
    monkeypatch.setenv("MUSTER_RUNS", "my runs")
    assert run.command("checkpoint list") == "muster checkpoint list j-1"
    monkeypatch.delenv("MUSTER_RUNS")
    assert RunDir(tmp_path / "runs" / "j-1").command("why") == "muster why j-1"


def test_a_run_that_cannot_be_told_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no runs here"):
        rundir.find_run(tmp_path, None)
    a_run(tmp_path, "j-20250101T000000Z-aaaaaa")
    a_run(tmp_path, "j-20250102T000000Z-bbbbbb")
    with pytest.raises(UsageError, match="'j-' matches 2 runs: j-20250101T000000Z-aaaaaa, j-20250102T000000Z-bbbbbb"):
        rundir.find_run(tmp_path, "j-", unique=True)
    with pytest.raises(NotFoundError, match="no run named 'x'; newest: "):
        rundir.find_run(tmp_path, "x")


def test_attempts_are_listed_oldest_first_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("attempt-010", "attempt-002", "attempt-1000", "attempt-0x1", "attempts.jsonl"):
        (tmp_path / name).mkdir()
    assert RunDir(tmp_path).attempt_numbers() == [2, 10, 1000]


def test_a_written_file_is_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    files.write_json(path, {"name": "ä"})
    files.write_json(path, {"name": "ö"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"name": "ö"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_leaves_the_old_file_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    files.write_text(path, "old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        files.write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.txt"]


def test_lines_are_appended_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    records = [{"text": "a\nb"}, {"text": "ä"}, {"step": 3}]
    for record in records:
        files.append_line(path, record)
    assert list(files.read_lines(path)) == records


def test_unfinished_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": \n[1]\n\xff\n{"c": 3}\n{"d": 4}')
    assert list(files.read_lines(path)) == [{"a": 1}, {"c": 3}]
    assert list(files.read_lines(tmp_path / "missing.jsonl")) == []


def test_a_line_on_a_full_disk_or_in_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="/dev/full: No space left on device"):
        files.append_line(Path("/dev/full"), {"a": 1})
    with pytest.raises(RunFolderError, match="No such file or directory"):
        files.append_line(tmp_path / "no" / "x.jsonl", {"a": 1})


def test_an_old_attempt_keeps_logs_steps_and_results(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    for number in range(6):
        folder = run.attempt(number)
        folder.make()
        made = [folder.placement, folder.resume, folder.command(0), folder.node(0), folder.setup(0), folder.timeline]
        made += [folder.bench, *(of(rank) for of in (folder.metrics, folder.memory, folder.err) for rank in (0, 11))]
        for path in made:
            path.write_text("something\n")
        folder.out(0).touch()
        run.trim_attempts(number)
    kept = [{path.name for path in run.attempt(number).path.iterdir()} for number in range(6)]
    logs = {"rank-00000.err", "rank-00011.err", "metrics-00000.jsonl", "resume.json", "timeline.jsonl", "bench.jsonl"}
    assert kept[1] == kept[2] == logs
    assert kept[0] == kept[3] == kept[4] == kept[5] > logs
