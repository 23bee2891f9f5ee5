"""`muster bench model` as a user calls it, and what it shows while a rank times."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.timing.files import read_timings
from muster.launch import cli
from muster.launch.bench.model_view import ModelView
from support import measured
from support.timings import end, header, peak, settings, timed, without_times, write_lines

pytestmark = [pytest.mark.command, pytest.mark.slow]

TINY = ("--batch", "2", "--context", "16", "--vocabulary", "300", "--steps", "2", "--launches", "2", "--no-matmul")


def bench_model(*arguments: str, runs: Path) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "muster", "bench", "model", *arguments, "--runs", str(runs)]
    return subprocess.run(argv, text=True, capture_output=True, timeout=55)


@pytest.mark.ranks
def test_models_are_timed_shown_written_and_shown_again(tmp_path: Path, capsys) -> None:
    out = tmp_path / "r.json"
    wanted = ("--model", "gpt-nano,gpt-2.7b", "--pass", "forward,step", "--untied", "--set", "timing.memory_share=0.1")
    done = bench_model(*wanted, *TINY, "--device", "cpu", "--out", str(out), runs=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert any(line.startswith("timing 4 rows on ") for line in said)
    assert any(line.startswith("gpt-nano step fp32: ") and line.endswith(" MB") for line in said)
    assert {f"wrote {out}", f"wrote {tmp_path / 'r.csv'}"} <= set(said)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("# model-gpt-nano-gpt-2.7b: timings of models on cpu · torch 2.")
    rows = [line.split() for line in lines if not line.startswith("#")]
    assert [row[:6] for row in rows[:2]] == [
        ["gpt-nano", "forward", "fp32", "138,048", "2", "16"],
        ["gpt-nano", "step", "fp32", "138,048", "2", "16"],
    ]
    assert [row[6:9] for row in rows[2:]] == [["out", "of", "memory:"]] * 2
    assert lines[-1] == "# verdict: OK"
    (timing,) = read_timings([out]).timings
    assert [len(row.steps_s) for row in timing.rows] == [4, 4, 0, 0]
    assert timing.rows[0].parameters == 138_048
    assert [row["state"] for row in csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text()))] == [
        *["ok"] * 2,
        *["memory"] * 2,
    ]
    capsys.readouterr()
    assert cli.main(["bench", "show", "--runs", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out == done.stdout
    assert cli.main(["bench", "show", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("", 2, "--model: is missing; name some of vgg11, "),
        ("--model gpt-smal", 2, "--model: unknown model 'gpt-smal'; did you mean 'gpt-small'?"),
        ("--model vgg11 --pass foward", 2, "--pass: unknown pass 'foward'; did you mean 'forward'?"),
        ("--model vgg11 --precision bf", 2, "--precision: unknown precision 'bf'; did you mean 'bf16'?"),
        ("--model vgg11 --steps 0", 2, "--steps: must be at least 1, got 0"),
        ("--model vgg11 --warmup -1", 2, "--warmup: must be at least 0, got -1"),
        ("--model vgg11 --batch many", 2, "--batch: must be a whole number, got 'many'"),
        ("--model vgg11 --timeout 0", 2, "--timeout: must be more than 0, got 0"),
        ("--model vgg11 --norm layer", 2, "options: norm is for GPTs, but none is timed"),
        ("--model gpt-nano --norm batch", 2, "--norm: must be 'rms', 'rms_fused' or 'layer', got 'batch'"),
        ("--model vgg11 --device cuda", 78, "--device: cuda: this machine has no GPU; name a host that has"),
        ("--model vgg11 --device cude", 2, "--device: "),
        ("--model vgg11 --on hand", 2, "--on hand: muster bench starts its runs itself"),
        ("--model vgg11 --out r.csv", 2, "--out r.csv: must end in .json"),
        (
            "--model vgg11 --set nodes=2",
            78,
            "command line: timing: runs on one rank, but this job has 2",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments, code, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["bench", "model", *arguments.split(), "--runs", str(tmp_path / "runs")]) == code
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"muster: {message}")
    assert not (tmp_path / "runs").exists()


def test_all_mistakes_are_said_at_once_and_none_twice(tmp_path, capsys) -> None:
    assert cli.main(["bench", "model", "--model", "gpt", "--pass", "back", "--runs", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["muster", "--model"]
    assert said[1].startswith("--model: unknown model 'gpt'")


def run_folder(tmp_path: Path, *records) -> RunDir:
    run = RunDir(tmp_path / "run")
    write_lines(run.attempt(0).bench, *records)
    return run


def rendered(view: ModelView) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    console.print(view.table(200))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_while_it_goes_on_the_rows_so_far_are_shown_and_what_is_under_way(tmp_path: Path) -> None:
    view = ModelView(run_folder(tmp_path, header(settings()), peak(), timed()))
    assert view.table(200) is None
    assert [type(record).__name__ for record in view.poll()] == ["Header", "Peak", "Timed"]
    text = rendered(view)
    assert "gpt-nano  forward      fp32       746,816" in text
    assert "# now gpt-nano step fp32, launch 1 of 3, 0 of 4 rows done" in text
    write_lines(tmp_path / "run/attempt-001/bench.jsonl", header(settings()))
    view.poll()
    assert "# now gpt-nano forward fp32, launch 1 of 3, 0 of 4 rows done" in rendered(view)


def test_without_a_terminal_the_beginning_and_each_row_are_a_line(tmp_path: Path) -> None:
    rows = (timed(), without_times("memory", "needs 38 GB", pass_name="step"))
    view = ModelView(run_folder(tmp_path, header(settings(launches=2)), peak(), *rows, end()))
    assert [line for record in view.poll() if (line := view.line_of(record))] == [
        "timing 4 rows on EPYC",
        "gpt-nano forward fp32: 11.0 ms +- 1.00 (first 100), 190 MB",
        "gpt-nano step fp32: out of memory: needs 38 GB",
    ]


def test_timings_and_collectives_are_not_taken_for_each_other(tmp_path: Path, capsys) -> None:
    timing = write_lines(tmp_path / "t.jsonl", header(settings()), timed(), end())
    other = tmp_path / "c.jsonl"
    measured.write_lines(other, measured.result(measured.settings(launches=1)))
    for arguments in (("show", timing, other), ("plot", timing, other, "-o", tmp_path / "x.svg")):
        assert cli.main(["bench", *map(str, arguments)]) == 2
        said = f"muster: {timing}: is a timing of models, but {other} is not; name results of one kind\n"
        assert capsys.readouterr().err == said
    assert cli.main(["bench", "fit", str(timing), "-o", str(tmp_path / "p.json")]) == 2
    assert cli.main(["bench", "compare", str(timing), str(other)]) == 78
    assert "compare: no row in common (1 rows before, 2 after)" in capsys.readouterr().err
    assert cli.main(["bench", "show", str(timing)]) == 0
    assert cli.main(["bench", "show", str(write_lines(tmp_path / "u.jsonl", header(settings()), timed()))]) == 1
    assert capsys.readouterr().out.endswith("# verdict: UNFINISHED\n")


def launched(path: Path, slower: float = 1.0, *, launches: int = 5, foreign: float = 0.0, **asked) -> Path:
    """Write a timing of a row whose launches took 10, 10.1, 10.2, ... ms, times a factor."""
    steps = [0.010 * slower * (1 + place / 100) for place in range(launches)]
    counts = [{"warm_up": 0, "steps": 1, "time": 10.0 + place, "foreign": foreign} for place in range(launches)]
    row = timed(warm_up_s=[], steps_s=steps, launches=counts)
    gone = without_times("memory", "needs 38 GB", pass_name="step")
    return write_lines(path, header(settings(**asked)), row, gone, end())


def test_timings_are_compared_by_their_launches(tmp_path: Path, capsys) -> None:
    one, same = launched(tmp_path / "a.jsonl"), launched(tmp_path / "b.jsonl", 1.001)
    slow = launched(tmp_path / "c.jsonl", 1.5, compile=True)
    assert cli.main(["bench", "compare", str(one), str(slow), "--fail-on", "worse"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[1].startswith("gpt-nano forward fp32 10.2 ms 15.3 ms 1.500 ")
    assert lines[1].endswith(" 5/5 worse significantly slower")
    assert lines[2].endswith("no verdict before: memory: needs 38 GB")
    assert cli.main(["bench", "compare", str(one), str(same), "--fail-on", "any", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"][0]["verdict"], found["rows"][0]["model"]) == ("same", "gpt-nano")
    assert found["together"]["model"] is None
    loaded = launched(tmp_path / "loaded.jsonl", 1.5, foreign=0.5)
    assert cli.main(["bench", "compare", str(one), str(loaded)]) == 0
    assert "no verdict  other programs used 0% of the CPUs before, 50% after" in capsys.readouterr().out
    assert cli.main(["bench", "show", str(loaded)]) == 0
    assert "# other programs used up to 50% of the CPUs during a launch\n" in capsys.readouterr().out
    few = [str(launched(tmp_path / f"{name}.jsonl", launches=2)) for name in "de"]
    assert cli.main(["bench", "compare", *few]) == 0
    assert "2 and 2 launches, expected at least 3" in capsys.readouterr().out
    joined = tmp_path / "joined.json"
    assert cli.main(["bench", "show", str(one), str(same), "--json"]) == 0
    joined.write_text(capsys.readouterr().out, encoding="utf-8")
    assert cli.main(["bench", "compare", str(joined), str(one), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["launches"] == [5, 5]  # launches of one time are the same
    old = write_lines(tmp_path / "old.jsonl", header(settings()), timed(launches=[]))  # of a Muster without launches
    assert cli.main(["bench", "compare", str(old), str(one)]) == 0
    captured = capsys.readouterr()
    assert "1 and 5 launches" in captured.out
    assert captured.err == f"muster: warning: {old}: not finished: 4 rows with launches left\n"
    assert cli.main(["bench", "show", str(one), str(slow), "--json"]) == 0
    joined.write_text(capsys.readouterr().out, encoding="utf-8")
    assert cli.main(["bench", "compare", str(joined), str(one)]) == 78
    assert "cannot be combined on one side" in capsys.readouterr().err


def test_a_job_that_times_norms_is_refused_with_the_program_that_does(tmp_path: Path, capsys) -> None:
    (tmp_path / "job.yaml").write_text("timing:\n  widths: [64]\n", encoding="utf-8")
    assert cli.main(["plan", str(tmp_path / "job.yaml")]) == 65
    said = "0.1.0 was the last version with this key; time norms with jobs/examples/kernels/norms.py\n"
    assert capsys.readouterr().err == f"muster: {tmp_path}/job.yaml:2: timing.widths: {said}"


def test_timings_are_drawn_as_bars(tmp_path: Path, capsys) -> None:
    one, slow = launched(tmp_path / "a.jsonl"), launched(tmp_path / "c.jsonl", 1.5)
    assert cli.main(["bench", "plot", str(one), str(slow), "-o", str(tmp_path / "both.svg")]) == 0
    assert (tmp_path / "both.svg").read_text().startswith("<?xml")
    nothing = write_lines(tmp_path / "n.jsonl", header(settings()), without_times("memory", "needs 38 GB"), end())
    assert cli.main(["bench", "plot", str(nothing), "-o", str(tmp_path / "n.svg")]) == 2
    assert "no row has a time" in capsys.readouterr().err
