"""`muster compare`: steps of all ranks, warm-up, rows against a baseline, and the same numbers in every form."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from muster.jobs.basics.errors import NotFoundError, UsageError
from muster.launch.cli import main
from muster.launch.look.comparison import compared
from muster.launch.look.steps import PARTS, read_measured
from muster.launch.sweeps.rows import baseline_of
from support.measured_runs import make_run, row


def test_a_step_is_that_of_the_slowest_rank_and_its_parts_add_up(tmp_path: Path) -> None:
    found = read_measured(make_run(tmp_path, "one"))
    assert (found.mode, found.ranks, found.batch, found.unit, found.skipped) == ("ddp", 2, 16, "tokens/s", 2)
    assert found.steps[0].number == 3
    for step in found.steps:
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert step.parts["computation"] == pytest.approx(0.95 * 0.5 * step.seconds)  # the mean of both ranks
        assert step.units == pytest.approx(16 * 64)


def test_warm_up_is_found_or_said(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    assert [len(read_measured(run, skip=skip).steps) for skip in (0, 5)] == [30, 25]
    assert read_measured(run, skip_epochs=1).steps[0].number == 11
    with pytest.raises(NotFoundError, match="all 30 recorded steps are skipped as warm-up; skip fewer"):
        read_measured(run, skip=30)


def test_the_newest_attempt_counts_and_torn_rows_do_not(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    again = run.attempt(1).path
    again.mkdir()
    run.attempt(1).metrics(0).write_text(
        json.dumps(row(30, 0, 9.0)) + '\n{"step": 31, "step_s": "x"}\n{"step": 32, "st'
    )
    found = read_measured(run)
    assert (found.steps[-1].number, found.steps[-1].seconds, found.ranks) == (30, 9.0, 1)


def test_rows_of_any_form_are_read_as_whole_chunks_are(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one")
    whole = read_measured(run, skip=0)
    for path in (run.metrics, run.attempt(0).metrics(0)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        spoilt = [
            '{"step": 98, "step_s": true}',
            '{"step": 1e400',
            "[1]",
            '{"step": 99, "loss": {"a": [1]}}',
            "\x00" * 99,
        ]
        path.write_text("\n".join([*spoilt, *map(json.dumps, rows), *spoilt, '{"step": 30, "st']))
    assert read_measured(run, skip=0) == whole
    nan = [{**row, "loss": math.nan, "note": ": NaN"} for row in rows]
    run.attempt(0).metrics(0).write_text("".join(json.dumps(row) + "\n" for row in nan))
    assert read_measured(run, skip=0) == whole
    negative = [{**row, "optimizer_s": -1e99} for row in rows]
    run.attempt(0).metrics(0).write_text("".join(json.dumps(row) + "\n" for row in negative))
    assert all(step.parts["optimizer"] >= 0.0 for step in read_measured(run, skip=0).steps)
    twice = ({"step": 30, "loss": math.nan}, {"step": 29, "loss": 2}, {"step": 29, "evaluation": True, "loss": 9})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in twice))
    assert [step.loss for step in read_measured(run, skip=0).steps[-2:]] == [2.0, None]


def groups(root: Path, times: dict[str, float], runs: int) -> dict[str, Any]:
    """Runs of each label, in turns."""
    found: dict[str, Any] = {label: [] for label in times}
    for turn in range(runs):
        for place, (label, seconds) in enumerate(times.items()):
            run = make_run(root, f"{label}-{turn}", seconds, began=100.0 * (turn * len(times) + place))
            found[label].append(read_measured(run))
    return found


def test_a_slower_row_is_told_from_an_equal_one(tmp_path: Path) -> None:
    rows = {each.label: each for each in compared(groups(tmp_path, {"a": 0.1, "b": 0.1, "c": 0.12}, 6), "a")}
    assert [rows[label].verdict for label in "abc"] == ["baseline", "same", "slower"]
    assert rows["c"].speedup == pytest.approx(1 / 1.2, rel=0.01)
    assert rows["b"].loss_difference == 0.0
    assert rows["a"].low_s <= rows["a"].median_s <= rows["a"].high_s


def test_single_runs_have_numbers_and_no_verdict(tmp_path: Path) -> None:
    _, row = compared(groups(tmp_path, {"a": 0.1, "b": 0.2}, 1), "a")
    assert (row.verdict, row.speedup) == ("no verdict", pytest.approx(0.5, rel=0.02))
    assert row.why == "1 run against 1, but a verdict needs 3 of each; repeat with muster sweep --repeat 5"


def test_efficiency_is_the_speed_up_by_the_ranks(tmp_path: Path) -> None:
    one, four = (read_measured(make_run(tmp_path, f"r{ranks}", ranks=ranks)) for ranks in (1, 4))
    _, row = compared({"1": [one], "4": [four]}, "1")
    assert row.speedup == pytest.approx(4.0, rel=0.02)
    assert row.efficiency == pytest.approx(1.0, rel=0.02)


def test_all_forms_have_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path, "one", 0.1), make_run(tmp_path, "two", 0.2, mode="flat")]
    words = ["compare", "--runs", str(tmp_path), f"{runs[0].run_id}=first", runs[1].run_id]

    def said(*more: str) -> str:
        assert main([*words, *more]) == 0
        return capsys.readouterr().out

    rows = json.loads(said("--json"))["rows"]
    assert [each["label"] for each in rows] == ["first", runs[1].run_id]
    for line, record in zip(csv.DictReader(io.StringIO(said("--csv"))), rows, strict=True):
        assert float(line["median_s"]) == record["median_s"]
        assert [float(line[f"{part}_s"]) for part in PARTS] == [record["parts_s"][part] for part in PARTS]
    table, markdown = said(), said("--markdown")
    for record in rows:
        for text in (f"{1e3 * record['median_s']:.2f}", f"{record['speedup']:.2f}"):
            assert text in table
            assert text in markdown
    assert "warm-up steps left out: first 2" in table


@pytest.mark.parametrize(
    ("asked", "said"), [("nope", "matches no row"), ("mode", "matches 2 rows"), (None, ""), ("mode=a", "")]
)
def test_the_baseline_is_one_row(asked: str | None, said: str) -> None:
    labels = ["mode=a", "mode=ab"]
    if not said:
        assert baseline_of(labels, asked) == "mode=a"
        return
    with pytest.raises(UsageError, match=f"--baseline {asked}: {said}; the rows are mode=a, mode=ab"):
        baseline_of(labels, asked)
