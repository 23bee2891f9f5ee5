"""`muster sweep`: what a sweep is made of, and sweeps on this machine."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster.jobs.basics import exits
from muster.jobs.basics.errors import JobFileError, NotFoundError, RefusedError, RunFolderError, UsageError
from muster.jobs.runfolder.rundir import RunDir, list_runs
from muster.launch.cli import main
from muster.launch.sweeps.grids import SweptKey, read_grid, read_grids, split_values
from muster.launch.sweeps.sweep import SweepRecord, complaint, exit_code, find_sweep, points_of
from support.exact_jobs import GPT, tokens
from support.live import argv, wait_until

pytestmark = [pytest.mark.command, pytest.mark.slow]

NANO = """
name: nano
train: {model: gpt-nano, data: synthetic, batch_size: 4, steps: 2, log_every: 1, optimizer: {name: adamw, lr: 1e-3}}
"""
EXIT = "name: exit\ngrace_s: 1\n" + argv("import os; exit(int(os.environ['CODE']))")
SLEEP = "name: sleep\ngrace_s: 1\n" + argv("import time; print('ready', flush=True); time.sleep(1000)")
SAVING = """
name: saving
checkpoint: {every_steps: 10000}
train: {model: gpt-nano, data: synthetic, batch_size: 4, steps: 100000, log_every: 1}
"""
patient = pytest.mark.timeout(180)

# Grids --------------------------------------------------------------------------------------------------------------


def test_the_last_grid_runs_fastest() -> None:
    points = points_of(read_grids(["train.mode=allreduce,ddp", "nodes=1,2"]), "vgg")
    assert [point.label for point in points] == [
        *("train.mode=allreduce nodes=1", "train.mode=allreduce nodes=2"),
        *("train.mode=ddp nodes=1", "train.mode=ddp nodes=2"),
    ]
    assert [point.name for point in points][:2] == ["vgg-mode-allreduce-nodes-1", "vgg-mode-allreduce-nodes-2"]


def test_every_point_runs_once_before_any_runs_again() -> None:
    points = points_of(read_grids(["train.mode=flat,ddp"], 2), "vgg", 2)
    assert [point.label for point in points] == ["train.mode=flat", "train.mode=ddp"] * 2
    assert [point.name for point in points][1:] == ["vgg-mode-ddp", "vgg-mode-flat-again-1", "vgg-mode-ddp-again-1"]
    assert [point.name for point in points_of(read_grids([], 3), "vgg", 3)] == ["vgg", "vgg-again-1", "vgg-again-2"]


def test_zipped_keys_go_in_pairs_and_combine_with_grids() -> None:
    axes = read_grids(["train.mode=flat,ddp"], 1, [["nodes=1,2,2", "train.batch_size=64,64,128"]])
    assert [point.label for point in points_of(axes, "vgg")] == [
        f"train.mode={mode} nodes={nodes} train.batch_size={batch}"
        for mode in ("flat", "ddp")
        for nodes, batch in ((1, 64), (2, 64), (2, 128))
    ]


@pytest.mark.parametrize(
    ("zips", "said"),
    [
        ([["a=1,2", "b=1"]], "--zip a=1,2 b=1: needs equally many values for each key: a has 2, b has 1"),
        ([["a=1,1", "b=2,2"]], "--zip a=1,1 b=2,2: has the same values twice; every point would run twice"),
        ([["a=1", "a=2"]], "--zip a=2: a already has values; give all of them in one option"),
        ([["nodes"]], "--zip nodes: must be of the form KEY=VALUE,VALUE"),
    ],
)
def test_a_bad_zip_is_one_message(zips: list[list[str]], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_grids([], 1, zips)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_an_error_of_a_zipped_value_names_the_option() -> None:
    axes = read_grids([], 1, [["a=1,2", "b=x,y"]])
    points = points_of(axes, "job")
    bad = [(point, JobFileError(f"--set {point.overrides[0]}: a: unknown key")) for point in points]
    assert str(complaint(bad, axes, 2)) == "--zip a=1,2: a: unknown key"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,4", ["1", "2", "4"]),
        ("vgg11", ["vgg11"]),
        ("{name: sgd, lr: 0.1},{name: adamw}", ["{name: sgd, lr: 0.1}", "{name: adamw}"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("{lr: [1,{a: 2,b: 3}]},x", ["{lr: [1,{a: 2,b: 3}]}", "x"]),
        ("it's,no", ["it's", "no"]),
        ("[1,2", ["[1,2"]),
        (" 1 , 2 ", ["1", "2"]),
        ("", [""]),
    ],
)
def test_a_comma_inside_brackets_or_quotes_belongs_to_the_value(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@given(st.lists(st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True), min_size=1, max_size=6))
def test_plain_values_come_back(values: list[str]) -> None:
    assert split_values(",".join(values)) == values


@given(st.text())
def test_any_text_is_split_without_losing_a_letter(text: str) -> None:
    rejoined = ",".join(split_values(text))
    assert [each for each in rejoined if not each.isspace()] == [each for each in text if not each.isspace()]


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,12}", fullmatch=True), st.lists(st.text(min_size=1), min_size=1, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
)
@example([("a", ["0", "0"]), ("a", [":", "2"])], "0")  # a number at the end that is another point's value
def test_names_are_names_of_runs_and_differ(grids: list[tuple[str, list[str]]], base: str) -> None:
    points = points_of([SweptKey(key, tuple(values)) for key, values in grids], base)
    names = [point.name for point in points]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 64 and set(name) <= set("-._") | set(map(chr, range(128))) for name in names)
    assert all(
        name[0].isalnum() and name.replace("-", "").replace(".", "").replace("_", "").isalnum() for name in names
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nodes", "must be of the form KEY=VALUE,VALUE"),
        ("=1,2", "must be of the form KEY=VALUE,VALUE"),
        ("train..lr=1", "must be of the form KEY=VALUE,VALUE"),
        ("nodes=", "has no value"),
        ("nodes=1,,2", "value 2 of 3 is empty"),
        ("nodes=1,2,1", "1 is given twice"),
        ("name=a,b", "name cannot be a grid"),
    ],
)
def test_a_bad_grid_is_one_message(word: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_grid(word)
    assert str(refused.value).startswith(f"--grid {word}: {said}")
    assert "\n" not in str(refused.value)


def test_all_bad_grids_are_told_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        read_grids(["nodes", "a=1", "a=2", "b="])
    assert [line.partition(": ")[0] for line in str(refused.value).splitlines()] == [
        *("--grid nodes", "--grid a=2", "--grid b="),
    ]


def test_a_sweep_has_grids_and_an_end() -> None:
    with pytest.raises(UsageError, match="--grid: is missing"):
        read_grids([])
    numbers = ",".join(map(str, range(40)))
    with pytest.raises(UsageError, match="make 1600 runs, more than the limit of 1000"):
        read_grids([f"a={numbers}", f"b={numbers}"])


def test_what_a_value_does_is_said_once_and_the_rest_names_its_points() -> None:
    grids = read_grids(["a=1,2", "b=x,y"])
    points = points_of(grids, "job")
    bad = [(point, JobFileError(f"--set {point.overrides[0]}: a: unknown key")) for point in points]
    assert str(complaint(bad, grids, 4)) == "--grid a=1,2: a: unknown key"
    told = complaint(
        [(points[1], RefusedError("job.yaml: too many")), (points[3], RefusedError("job.yaml: odd"))], grids, 4
    )
    assert str(told) == "point a=1 b=y: job.yaml: too many\npoint a=2 b=y: job.yaml: odd"
    assert told.exit_code == exits.REFUSED
    assert complaint([*bad[:1], (points[3], RefusedError("x"))], grids, 4).exit_code == exits.BAD_JOB


def test_the_first_failure_is_the_exit_code() -> None:
    assert exit_code([0, 0]) == 0
    assert exit_code([0, 7, 9]) == 7
    assert exit_code([0, None]) == 1


# The record ---------------------------------------------------------------------------------------------------------


def test_a_record_reads_back_and_is_found_by_a_part_of_its_name(tmp_path: Path) -> None:
    points = tuple(points_of([SweptKey("nodes", ("1", "2"))], "vgg"))
    record = SweepRecord("vgg", "/job.yaml", "local", 1.5, points, ("run-a", "run-b"))
    for name in ("sweep-vgg-1", "sweep-vgg-2"):
        (tmp_path / name).mkdir()
        record.write(tmp_path / name)
    assert SweepRecord.read(tmp_path / "sweep-vgg-1") == record
    assert [run.path for run in record.runs(tmp_path / "sweep-vgg-1")] == [tmp_path / "run-a", tmp_path / "run-b"]
    assert find_sweep(tmp_path, "vgg-2") == tmp_path / "sweep-vgg-2"
    assert find_sweep(Path("/nowhere"), str(tmp_path / "sweep-vgg-1")) == tmp_path / "sweep-vgg-1"
    assert find_sweep(tmp_path, "vgg") == tmp_path / "sweep-vgg-2"
    with pytest.raises(NotFoundError, match="no sweep named 'gpt'; found: sweep-vgg-1, sweep-vgg-2"):
        find_sweep(tmp_path, "gpt")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"version": 1}'])
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"sweep\.json"):
        SweepRecord.read(tmp_path)


# Here ---------------------------------------------------------------------------------------------------------------

Sweep = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Sweep:
    """Call `muster sweep` in this process: (code, out, err)."""

    def call(text: str, *words: str) -> tuple[int, str, str]:
        job = tmp_path / "job.yaml"
        job.write_text(text)
        capfd.readouterr()
        code = main(["sweep", str(job), *words, "--runs", str(tmp_path / "runs")])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def rows(out: str) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = json.loads(out)["points"]
    return points


@pytest.mark.ranks
@patient
def test_tiny_trainings_one_after_another_and_their_table(
    sweep: Sweep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    grids = ("--grid", "nodes=1", "--zip", "train.optimizer.lr=1e-3,1e-4", "train.mode=bucketed,flat")
    code, out, err = sweep(NANO, *grids, "--set", "train.bucket_size_mb=1", "--json")  # one of the modes reads it
    assert code == 0, err
    table = rows(out)
    assert [row["point"] for row in table] == [
        "nodes=1 train.optimizer.lr=1e-3 train.mode=bucketed",
        "nodes=1 train.optimizer.lr=1e-4 train.mode=flat",
    ]
    assert {(row["state"], row["code"], row["step"], row["steps"]) for row in table} == {("done", 0, 2, 2)}
    assert all(
        row["loss"] > 0 and 0 < row["rate_low"] <= row["rate"] <= row["rate_high"] and row["seconds"] > 0
        for row in table
    )
    assert [run.run_id for run in list_runs(tmp_path / "runs")] == sorted(row["run_id"] for row in table)
    capfd.readouterr()
    assert main(["sweep", "--show", "sweep-nano", "--runs", str(tmp_path / "runs"), "--json"]) == 0
    assert rows(capfd.readouterr().out) == table
    assert main(["sweep", "--show", "sweep-nano", "--runs", str(tmp_path / "runs")]) == 0
    head = capfd.readouterr().out.splitlines()[0]
    assert " ".join(head.split()) == "point state exit took step loss median rate middle half run"


@pytest.mark.ranks
def test_a_failed_point_does_not_end_the_sweep_unless_it_shall(sweep: Sweep) -> None:
    code, out, _ = sweep(EXIT, "--grid", "env.CODE='0','7','9'", "--json")
    assert code == 7
    assert [row["code"] for row in rows(out)] == [0, 7, 9]
    code, out, _ = sweep(EXIT, "--grid", "env.CODE='0','7','9'", "--no-keep-going", "--json")
    assert code == 7
    assert [(row["state"], row["code"]) for row in rows(out)] == [("done", 0), ("failed", 7), ("not run", None)]


def test_every_bad_point_is_told_before_anything_starts(sweep: Sweep, tmp_path: Path) -> None:
    code, _, err = sweep(NANO, "--grid", "train.batch_size=1,4", "--grid", "nodes=1,2,3")
    assert code == exits.REFUSED
    lines = err.removeprefix("muster: ").splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "point train.batch_size=1 nodes=2",
        "point train.batch_size=1 nodes=3",
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("values", ["false,true", "false"])
def test_a_sweep_over_a_key_that_no_point_reads_is_refused(sweep: Sweep, tmp_path: Path, values: str) -> None:
    code, _, err = sweep(NANO, "--grid", f"train.reshard_after_forward={values}")
    assert (code, err) == (
        exits.BAD_JOB,
        f"muster: --grid train.reshard_after_forward={values}: train.reshard_after_forward: has no effect in mode ddp; "
        "it is for modes zero3 and fsdp; remove it\n",
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--grid", "train.mdoe=a,b"], exits.BAD_JOB, "--grid train.mdoe=a,b: train.mdoe: unknown key; did you mean"),
        (["--grid", "nodes=2,x"], exits.BAD_JOB, "--grid nodes=x: nodes: must be a whole number"),
        (["--grid", "nodes=1,2", "-N", "3"], exits.USAGE, "--grid nodes and -N both set nodes"),
        (["--grid", "nodes=1", "--set", "nodes=3"], exits.USAGE, "--grid nodes and --set nodes both set nodes"),
        (["--grid", "nodes=1", "--limit", "0"], exits.USAGE, "--limit: must be at least 1"),
        (["--grid", "nodes=1", "--limit", "2"], exits.USAGE, "--limit 2: is for Slurm arrays only"),
        (["--grid", "nodes=1", "--on", "hand"], exits.USAGE, "--on hand: a sweep starts its runs itself"),
        ([], exits.USAGE, "--grid: is missing"),
    ],
)
def test_what_is_wrong_is_one_message(sweep: Sweep, words: list[str], code: int, said: str) -> None:
    ended, _, err = sweep(NANO, *words)
    assert (ended, err.count("\n")) == (code, 1)
    assert err.startswith(f"muster: {said}")


def test_a_dry_run_shows_the_points_and_makes_nothing(sweep: Sweep, tmp_path: Path) -> None:
    words = ("--zip", "nodes=1,2", "train.batch_size=4,8", "--dry-run")
    code, out, err = sweep(NANO, *words, "--json")
    assert code == 0, err
    assert [(row["point"], row["nodes"], row["ranks"]) for row in rows(out)] == [
        *(("nodes=1 train.batch_size=4", 1, 1), ("nodes=2 train.batch_size=8", 2, 2)),
    ]
    heading, *points = (line.split() for line in sweep(NANO, *words)[1].splitlines())
    assert heading == ["point", "name", "nodes", "ranks"]
    assert points[1][-3:] == ["nano-nodes-2-batch_size-8", "2", "2"]
    assert sweep(NANO, "--grid", "train.mdoe=a", "--dry-run")[0] == exits.BAD_JOB
    assert not (tmp_path / "runs").exists()


@pytest.mark.ranks
@patient
def test_a_stopped_sweep_resumes_with_the_points_that_are_not_finished(
    sweep: Sweep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "name: gate\ngrace_s: 1\n" + argv(
        "import os, time; print('begun', flush=True); "
        f"time.sleep(1000 * (os.environ['A'] == 'slow' and not os.path.exists('{tmp_path}/open')))"
    )
    runs = tmp_path / "runs"
    (tmp_path / "job.yaml").write_text(text)
    words = [str(tmp_path / "job.yaml"), "--grid", "env.A=quick,slow,last", "--runs", str(runs), "--json"]
    with subprocess.Popen([sys.executable, "-m", "muster", "sweep", *words], stdout=subprocess.PIPE) as process:
        wait_until(lambda: runs.is_dir() and len(list_runs(runs)) == 2, "the second run")
        wait_until(
            lambda: any("slow" in run.run_id and run.attempt(0).out(0).exists() for run in list_runs(runs)), "it"
        )
        capfd.readouterr()
        assert main(["resume", "sweep-gate", "--runs", str(runs)]) == exits.REFUSED
        assert main(["rm", "sweep-gate", "--runs", str(runs)]) == exits.REFUSED
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    capfd.readouterr()
    assert main(["why", "sweep-gate", "--runs", str(runs)]) == 0
    assert ": 1 done, 1 stopped, 1 not run\n" in capfd.readouterr().out
    (tmp_path / "job.yaml").write_text("the sweep has its own copy")
    (tmp_path / "open").touch()
    assert main(["resume", "sweep-gate", "--runs", str(runs), "-N", "2"]) == exits.USAGE
    assert main(["resume", "sweep-gate", "--runs", str(runs)]) == 0
    capfd.readouterr()
    assert main(["status", "sweep-gate", "--runs", str(runs), "--json"]) == 0
    assert [row["state"] for row in rows(capfd.readouterr().out)] == ["done"] * 3
    assert {run.run_id.split("-2")[0]: run.attempt_numbers() for run in list_runs(runs)} == {
        "gate-A-quick": [0],
        "gate-A-slow": [0, 1],
        "gate-A-last": [0],
    }
    assert main(["resume", "sweep-gate", "--runs", str(runs)]) == 0
    assert "every point is done or failed" in capfd.readouterr().err
    assert main(["rm", "sweep-gate", "--runs", str(runs)]) == 0
    assert not list_runs(runs)


@pytest.mark.ranks
@patient
def test_a_training_that_saves_nothing_is_replaced_by_a_new_run_when_its_sweep_resumes(
    sweep: Sweep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    # Its steps wait for their samples, so that there is time to interrupt them.
    slow = {"model": {**GPT, "vocabulary": 64}, "data": tokens(pause_s=0.1), "batch_size": 4, "steps": 10}
    with two_points(tmp_path, json.dumps({"name": "nano", "train": {**slow, "log_every": 1}})) as process:
        wait_for_first(runs, lambda run: run.metrics)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    first = list_runs(runs)[0].run_id
    assert main(["resume", "sweep-nano", "--runs", str(runs)]) == 0
    capfd.readouterr()
    assert main(["status", "sweep-nano", "--runs", str(runs), "--json"]) == 0
    table = rows(capfd.readouterr().out)
    assert [(row["state"], row["step"]) for row in table] == [("done", 10), ("done", 10)]
    assert first not in {row["run_id"] for row in table}
    assert len(list_runs(runs)) == 3


def two_points(folder: Path, text: str, *words: str) -> "subprocess.Popen[str]":
    """Start a sweep over one node and two in a process of its own."""
    (folder / "job.yaml").write_text(text)
    command = [sys.executable, "-m", "muster", "sweep", str(folder / "job.yaml"), "--grid", "nodes=1,2", *words]
    return subprocess.Popen([*command, "--runs", str(folder / "runs"), "--json"], stdout=subprocess.PIPE, text=True)


def wait_for_first(runs: Path, sign: Callable[[RunDir], Path]) -> None:
    """Wait until a file of the first point's run has something in it."""
    wait_until(lambda: runs.is_dir() and list_runs(runs), "a run")
    path = sign(list_runs(runs)[0])
    wait_until(lambda: path.is_file() and path.read_text(), str(path))


@pytest.mark.ranks
@patient
@pytest.mark.parametrize(
    ("text", "sign"),
    [(SLEEP, lambda run: run.attempt(0).out(0)), (SAVING, lambda run: run.metrics)],
    ids=["ends at once", "saves first"],
)
def test_ctrl_c_ends_the_point_and_the_sweep(tmp_path: Path, text: str, sign: Callable[[RunDir], Path]) -> None:
    with two_points(tmp_path, text) as process:
        wait_for_first(tmp_path / "runs", sign)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == exits.STOPPED
    assert [row["state"] for row in rows(out)] == ["stopped", "not run"]


@pytest.mark.ranks
@patient
def test_muster_stop_ends_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    with two_points(tmp_path, SLEEP) as process:
        wait_for_first(runs, lambda run: run.attempt(0).out(0))
        assert main(["stop", "sweep-sleep", "--runs", str(runs)]) == 0
        out, _ = process.communicate(timeout=60)
    assert process.returncode == exits.STOPPED
    assert [row["state"] for row in rows(out)] == ["stopped", "not run"]
    assert ": stopped 1 run; no further run starts\n" in capsys.readouterr().out
    assert main(["stop", str(find_sweep(runs, "sleep")), "--json", "--runs", str(runs)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["stopped"], [run["was_over"] for run in again["runs"]]) == (0, [True])
    assert main(["stop", "sweep-none", "--runs", str(runs)]) == exits.NOT_FOUND
    assert "no sweep named 'sweep-none'" in capsys.readouterr().err


def test_a_sweep_that_is_refused_leaves_nothing(sweep: Sweep, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with (work / "data").open("wb") as file:
        file.truncate(100 << 20)
    code, out, err = sweep(f"workdir: {work}\n" + EXIT, "--grid", "nodes=1,2", "--on", "slurm")
    assert (code, out) == (exits.REFUSED, "")
    assert "too much to copy as code" in err
    assert list((tmp_path / "runs").iterdir()) == []


# In a box -----------------------------------------------------------------------------------------------------------
