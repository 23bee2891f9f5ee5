"""`muster bench` as a user calls it: real ranks, one run a world, the table once, and the files."""

import argparse
import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from muster.collectives_bench.records import Result
from muster.jobs.runfolder.rundir import RunDir
from muster.launch import cli
from muster.launch.bench.grid import prepare_worlds
from muster.launch.commands.bench import configure, grid_of
from support.live import wait_until

pytestmark = [pytest.mark.command, pytest.mark.slow]

QUICK = ("--launches", "2", "--block-s", "0.02", "--sizes", "8,64K")


def bench(*arguments: str, runs: Path, **fields) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "muster", "bench", *arguments, "--runs", str(runs)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **fields}
    return subprocess.Popen(argv, text=True, env={**os.environ, "COLUMNS": "120", "TERM": "xterm"}, **pipes)


def on_a_terminal(*arguments: str, runs: Path) -> tuple[int, str, str]:
    """Call it with standard error a terminal; return the code, standard output, and what the terminal was sent."""
    leader, follower = pty.openpty()
    process = bench(*arguments, runs=runs, stderr=follower)
    os.close(follower)
    sent: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(leader, 1 << 16):
                sent.append(data)
        except OSError:  # the other end has closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    out, _ = process.communicate(timeout=50)
    reader.join(timeout=10)
    os.close(leader)
    return process.returncode, out, b"".join(sent).decode()


def measured(out: str) -> list[str]:
    """Return the lines of a report that hold numbers."""
    return [line for line in out.splitlines() if not line.startswith("#")]


@pytest.mark.ranks
def test_operations_are_measured_shown_once_and_written_as_json_csv_and_a_plot(tmp_path: Path) -> None:
    files = ("--out", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg"))
    code, out, terminal = on_a_terminal("all_reduce,barrier", *QUICK, *files, runs=tmp_path / "runs")
    assert code == 0, terminal
    lines = out.splitlines()
    assert lines[0].startswith("# bench-all_reduce-barrier: 1 node x 2 ranks, gloo on cpu · torch 2.")
    assert lines[-1] == "# verdict: OK"
    assert [line.split()[:6] for line in measured(out)] == [
        ["8", "2", "fp32", "sum", "-", "in"],
        ["65536", "16384", "fp32", "sum", "-", "in"],
        ["-", "-", "-", "-", "-", "in"],
    ]
    assert "median so far" in terminal
    assert "of 6 done" in terminal
    assert "#wrong" not in terminal
    result = Result.model_validate_json((tmp_path / "r.json").read_text())
    assert len(result.blocks) == 6
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    assert [(row["operation"], row["nbytes"]) for row in rows] == [
        ("all_reduce", "8"),
        ("all_reduce", "65536"),
        ("barrier", "0"),
    ]
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")


@pytest.mark.ranks
def test_every_world_of_a_grid_is_a_run_and_one_that_is_refused_leaves_the_others(tmp_path: Path) -> None:
    process = bench(*QUICK, "send_recv", "ping_pong", "-N", "1", "-n", "1,2", runs=tmp_path / "runs")
    out, err = process.communicate(timeout=50)
    assert process.returncode == 78, err
    assert "[1/2] nodes=1 ranks_per_node=1\nmuster: command line: bench.operation: send_recv needs 2 ranks" in err
    assert "[2/2] nodes=1 ranks_per_node=2\nrun " in err
    assert re.search(r"^measuring 4 cells in 2 launches: 1 node x 2 ranks, gloo on cpu$", err, re.MULTILINE)
    assert "\nlaunch 2 of 2: 4 cells\n" in err
    assert len(measured(out)) == 4
    assert out.splitlines()[-2:] == ["# not measured: nodes=1 ranks_per_node=1", "# verdict: UNFINISHED"]
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.ranks
def test_a_job_file_is_measured_with_options_over_it_and_printed_as_json(tmp_path: Path) -> None:
    job = tmp_path / "mine.yaml"
    job.write_text("nodes: 2\nbench: {operation: [broadcast], sizes: [8], launches: 9, block_s: 0.02}\n")
    process = bench(str(job), "--launches", "1", "--seed", "5", "--json", "--no-check", runs=tmp_path / "runs")
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert (found["muster_bench"], len(found["blocks"])) == (1, 1)
    (header,) = found["headers"]
    assert (header["name"], header["world"]["nodes"]) == ("mine", 2)
    assert (header["settings"]["seed"], header["settings"]["check"]) == (5, False)
    assert cli.main(["bench", "show", str(next((tmp_path / "runs").iterdir()))]) == 0


@pytest.mark.ranks
def test_ctrl_c_ends_it_with_130_and_what_was_measured_is_shown(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = bench("all_reduce", "--sizes", "8", "--launches", "500", "--block-s", "0.01", "-n", "1,2", runs=runs)
    try:
        wait_until(lambda: runs.is_dir() and any(runs.iterdir()), "the run folder")
        file = RunDir(next(runs.iterdir())).attempt(0).bench
        wait_until(lambda: file.is_file() and len(file.read_text().splitlines()) > 1, "the first block")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert len(measured(out)) == 1
    assert "[2/2]" not in err


@pytest.mark.ranks
@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["text", "json"])
def test_ctrl_c_in_the_second_world_names_what_was_not_measured(tmp_path: Path, as_json: tuple[str, ...]) -> None:
    runs = tmp_path / "runs"
    process = bench("all_reduce", *QUICK, "-n", "1,2,3", *as_json, runs=runs)
    try:
        wait_until(lambda: runs.is_dir() and len(list(runs.iterdir())) == 2, "the second run's folder")
        second = RunDir(max(runs.iterdir(), key=lambda path: path.stat().st_ctime_ns))
        wait_until(lambda: second.lease.exists() or second.events.exists(), "its supervisor")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 130, err
    missing = "not measured: nodes=1 ranks_per_node=2; nodes=1 ranks_per_node=3"
    if as_json:
        assert f"muster: {missing}\n" in err
    else:
        assert out.splitlines()[-2:] == [f"# {missing}", "# verdict: UNFINISHED"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "WHAT: is missing; name a job file, operations such as all_reduce,broadcast"),
        (("al_reduce",), 2, "unknown operation 'al_reduce'; did you mean 'all_reduce'? (valid: all, ours, all_reduce"),
        (("all_reduce", "--sizes", "5Q"), 2, "--sizes: not a size: '5Q'"),
        (("all_reduce", "--on", "hand"), 2, "--on hand: muster bench starts its runs itself"),
        (("all_reduce", "--out", "r.txt"), 2, "--out r.txt: must end in .json"),
        (("all_reduce", "--plot", "r.gif"), 2, "--plot r.gif: must end in .png or .svg or .pdf"),
        (("--pairs", "--plot", "r.png"), 2, "--plot r.png: pairs are measured at one size"),
        (
            ("--pairs", "all_reduce"),
            2,
            "--pairs: measures messages between nodes, not operations; leave all_reduce",
        ),
        (
            ("--pairs", "--wire"),
            2,
            "--pairs: measures messages between nodes, not operations; leave --wire out",
        ),
        (("gone.yaml",), 65, "gone.yaml: no such file"),
        (
            ("jobs/examples/hello.yaml",),
            2,
            "jobs/examples/hello.yaml: the operation hello measures nothing; start the job with muster run",
        ),
        (("jobs/examples/vgg11.yaml",), 2, "jobs/examples/vgg11.yaml: is a train: job"),
        (("send_recv", "-n", "1"), 78, "command line: bench.operation: send_recv needs 2 ranks, but this job has 1"),
        (("all_reduce", "--set", "bench.launchs=2"), 65, "--set bench.launchs=2: bench.launchs: unknown key"),
        (("compare",), 2, "the following arguments are required: BEFORE, AFTER"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, code, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    argv = ["bench", *arguments]
    if arguments[:1] != ("compare",):
        argv += ["--runs", str(tmp_path / "runs")]
    assert cli.main(argv) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ("all_reduce", [(1, 2)]),
        ("all_reduce -N 2", [(2, 1)]),
        ("all_reduce -n 3", [(1, 3)]),
        ("all_reduce -N 1,2 -n 1,3", [(1, 1), (1, 3), (2, 1), (2, 3)]),
        ("--pairs", [(2, 1)]),
        ("all_reduce -w n[1-3]", [(3, 1)]),
        ("all_reduce -w n[1-3] -N 2 -n 2", [(2, 2)]),
        ("--pairs -w n[1-4] -e n2", [(3, 1)]),
        ("all_reduce --on slurm", [(2, 1)]),
    ],
)
def test_where_nobody_says_all_hosts_are_measured_or_two_ranks_here(arguments, shape, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    parser = argparse.ArgumentParser()
    configure(parser)
    worlds = prepare_worlds(grid_of(parser.parse_args([*arguments.split(), "--runs", str(tmp_path)])))
    placements = [world.prepared.context.placement for world in worlds if world.prepared is not None]
    assert [(len(each.nodes), each.world_size // len(each.nodes)) for each in placements] == shape
    assert not list(tmp_path.iterdir())


def test_several_backends_are_worlds_of_their_own(tmp_path: Path, capsys) -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    words = ["all_reduce", "-n", "2,3", "--runs", str(tmp_path)]
    worlds = prepare_worlds(grid_of(parser.parse_args([*words, "--backend", "gloo,nccl"])))
    assert [each.label for each in worlds] == [
        f"nodes=1 ranks_per_node={ranks} backend={backend}" for ranks in (2, 3) for backend in ("gloo", "nccl")
    ]
    settings = [each.prepared.context.job.settings.backend for each in worlds if each.prepared is not None]
    assert set(settings) <= {"gloo", "nccl"}
    for given, said in (("gloo,gloo", "gloo is given twice"), ("gloo,nope", "nope")):
        assert cli.main(["bench", *words, "--backend", given]) == 2
        assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_a_sweep_of_a_benchmark_ends_with_its_numbers(tmp_path: Path, capsys) -> None:
    job = tmp_path / "bench.yaml"
    job.write_text(
        "name: b\nranks_per_node: 2\nbench: {operation: all_reduce, sizes: [1024], launches: 1, block_s: 0.01}\n"
    )
    words = ["sweep", str(job), "--grid", "ranks_per_node=1,2", "--runs", str(tmp_path / "runs")]
    assert cli.main(words) == 0
    assert "busbw (GB/s)" in capsys.readouterr().out
    assert cli.main(["status", "sweep-b", "--runs", str(tmp_path / "runs"), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert [(row["point"], row["measured"]) for row in measured] == [
        (f"ranks_per_node={ranks}", "all_reduce 1 KB fp32 in") for ranks in (1, 2)
    ]
    assert all(row["time_us"] > 0 for row in measured)


def test_a_training_job_is_sent_to_muster_run(tmp_path: Path, capsys) -> None:
    job = tmp_path / "train.yaml"
    job.write_text("train: {model: vgg11, data: digits, mode: single, batch_size: 8, epochs: 1}\n")
    assert cli.main(["bench", str(job), "--runs", str(tmp_path / "runs")]) == 2
    assert (
        capsys.readouterr().err
        == f"muster: {job}: is a train: job; muster bench measures bench: jobs, muster run runs it\n"
    )


def test_first_words_have_help_of_their_own(capsys) -> None:
    assert cli.main(["bench", "compare", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: muster bench compare ")
    assert cli.main(["help", "bench"]) == 0
    assert "muster bench model | show | compare | plot | fit have options of their own" in " ".join(
        capsys.readouterr().out.split()
    )
