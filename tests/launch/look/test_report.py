"""`muster report`: the numbers of its page, whole and hostile run folders, and what it writes beside the page."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.runfolder.rundir import RunDir
from muster.launch.cli import main
from muster.launch.look.comparison import compared
from muster.launch.look.comparison_view import cells
from muster.launch.look.steps import read_measured
from support.report_runs import write_run

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}\u202e\x07\ud800"


def report(folder: Path, *targets: str, options: tuple[str, ...] = ()) -> str:
    output = folder / "page.html"
    assert main(["report", *targets, "--runs", str(folder), "--output", str(output), *options]) == 0
    return output.read_text(encoding="utf-8")


def records(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="records">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.slow
def test_the_page_has_the_numbers_of_compare_and_plot_to_the_digit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [write_run(tmp_path, name, mode=mode).run_id for name, mode in (("one", "ddp"), ("two", "allreduce"))]
    page = report(tmp_path, *names, options=("--files",))
    capsys.readouterr()
    assert main(["compare", *names, "--runs", str(tmp_path), "--json"]) == 0
    assert records(page) == json.loads(capsys.readouterr().out)["rows"]
    groups = {name: [read_measured(RunDir(tmp_path / name))] for name in names}
    for row in compared(groups, names[0]):
        assert all(f">{cell}<" in page for cell in cells(row) if cell is not None)
    files = tmp_path / "page-files"
    written = {path.name for path in files.iterdir()}
    kinds = {
        f"{kind}.{form}"
        for kind in ("split_time", "throughput", "loss", "loss_time", "memory")
        for form in ("png", "csv")
    }
    assert written == {*kinds, "rows.csv", "report.json"}
    assert main(["plot", "loss", *names, "--runs", str(tmp_path), "--json"]) == 0
    plots = {plot["kind"]: plot for plot in json.loads((files / "report.json").read_text())["plots"]}
    assert plots["loss"] == json.loads(capsys.readouterr().out)["plot"]
    assert len(plots["loss"]["series"][0]["y"]) == 30
    assert plots["loss_time"]["series"][0]["y"] == plots["loss"]["series"][0]["y"]


def test_a_failed_attempt_is_shown_with_the_time_that_it_cost(tmp_path: Path) -> None:
    run = write_run(tmp_path, "one", fails=True)
    page = report(tmp_path, run.run_id)
    for text in ("rank 1 died", "1 to 17", "aten::mm", "MmBackward0", "10.0.0.1", "gpt-nano"):
        assert text in page
    assert page.count("<h2") == 3


@pytest.mark.parametrize("kind", ["empty", "crashed", "half-written", "hostile", "links"])
def test_any_folder_makes_a_report_that_says_what_is_missing(tmp_path: Path, kind: str) -> None:
    run = write_run(tmp_path, "one", word=HOSTILE if kind == "hostile" else "", fails=True)
    for path in [path for path in run.path.rglob("*") if path.is_file()]:
        if kind == "empty":
            path.unlink()
        elif kind == "half-written":
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    if kind == "empty":
        run.events.touch()
    if kind == "crashed":  # its supervisor is gone, and nobody wrote an end
        run.events.write_text("".join(run.events.read_text().splitlines(keepends=True)[:2]))
        run.attempts.unlink()
    if kind == "links":
        for path in (run.attempt(0).metrics(0), run.job, run.attempt(1).placement, run.attempt(1).memory(0)):
            path.unlink()
            path.symlink_to("/etc/hostname")
    if kind == "hostile":
        spoil(run)
    page = report(tmp_path, run.run_id)
    assert run.run_id in page
    assert ("No run has steps" in page) == (kind in ("empty", "links"))
    assert re.findall(r"<script[^>]*>", page) == ['<script type="application/json" id="records">', "<script>"]
    assert "<img" not in page
    assert not any(each in page for each in ("\u202e", "\x07", ">49<"))


def spoil(run: RunDir) -> None:
    """Add what only a hostile program writes: a log of 1 GB, numbers that are none, nesting, other types."""
    newest = run.attempt(1)
    with newest.out(0).open("wb") as log, run.supervisor_log.open("wb") as other:
        os.truncate(log.fileno(), 1 << 30)
        os.truncate(other.fileno(), 1 << 30)
    bad = ['{"step": 1e400, "step_s": NaN}', '{"step": 7, "step_s": -Infinity}', '{"step": true, "step_s": "9"}']
    bad += ["[" * 100_000, '{"step": 8, "step_s": ' + "9" * 5000 + "}", '{"step": 9, "step_s": 1e300}', "\x00" * 9999]
    for path in (newest.metrics(0), run.metrics, run.events, run.attempts, newest.memory(0)):
        path.write_text("\n".join([*bad, path.read_text(), *bad]) + "\n")
    record = newest.profile(0).path / "profile.json"
    wrong = {"modules": {"a": 1e308, "b": "x"}, "memory_over_time": [[1, 2, 3], "x"], "allocations": [{"bytes": "x"}]}
    record.write_text(json.dumps({**json.loads(record.read_text()), **wrong}))
    (newest.profile(0).path / "flame.json").write_text(json.dumps({"frames": [[-1, "x", "y", 1e308, 1]]}))


def test_a_file_that_is_no_report_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, "one")
    for _ in range(2):  # a report is
        report(tmp_path, run.run_id)
    page = tmp_path / "page.html"
    page.write_text("my thesis")
    words = ["report", run.run_id, "--runs", str(tmp_path), "--output", str(page)]
    assert main(words) == 2
    assert "is not a Muster report" in capsys.readouterr().err
    assert page.read_text() == "my thesis"
    assert main([*words, "--force"]) == 0
    assert main([*words[:-1], str(tmp_path / "page.txt")]) == 2


def test_a_timeline_that_cannot_be_read_is_named_and_the_rest_of_the_page_is_shown(tmp_path: Path) -> None:
    run = RunDir(write_run(tmp_path, "one", mode="ddp").path)
    timeline = run.attempt(0).timeline
    timeline.unlink(missing_ok=True)
    timeline.mkdir()
    assert f"{timeline}: " in report(tmp_path, run.run_id)
