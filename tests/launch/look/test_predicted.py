"""Predictions beside measurements: in `muster compare` and in a report, and files that are no advice."""

import json
from pathlib import Path

import pytest

from muster.launch.cli import main
from support.measured_runs import make_run

PARTS = {"data": 0.0, "computation": 0.05, "bubble": 0.01, "communication": 0.03, "update": 0.01, "host": 0.0}


def advice(folder: Path, batch: int = 16) -> Path:
    """Write an advice with a prediction of mode ddp."""
    changes = {"parallel": None, "microbatches": None, "mode": "ddp"}
    row = {"plan": "ddp", "changes": changes, "parts": PARTS}
    other = {"plan": "zero1", "changes": {**changes, "mode": "zero1"}, "parts": PARTS}
    (folder / "advice.json").write_text(
        json.dumps({"muster_advice": 1, "batch": batch, "best": None, "rows": [other, row, {"parts": 3}]})
    )
    return folder / "advice.json"


def test_each_part_of_a_step_stands_beside_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, words = make_run(tmp_path, "one"), ["--runs", str(tmp_path), "--advice", str(advice(tmp_path))]
    assert main(["compare", run.run_id, *words, "--json"]) == 0
    found = {each["part"]: each for each in json.loads(capsys.readouterr().out)["predicted"]}
    assert list(found) == ["computation", "waiting", "update", "data", "step"]
    assert {each["plan"] for each in found.values()} == {"ddp"}
    assert found["waiting"]["predicted_s"] == pytest.approx(0.04)
    assert found["step"]["predicted_s"] == pytest.approx(0.10)
    assert found["step"]["error"] == pytest.approx(0.10 / found["step"]["measured_s"] - 1)
    parts = ("computation", "waiting", "update", "data")
    assert sum(found[part]["measured_s"] for part in parts) == pytest.approx(found["step"]["step_s"])
    assert main(["compare", run.run_id, *words]) == 0
    assert "waiting" in capsys.readouterr().out
    assert main(["report", run.run_id, *words, "-o", str(tmp_path / "page.html")]) == 0
    assert "Predicted and measured parts of a step" in (tmp_path / "page.html").read_text()


def test_a_run_that_the_advice_does_not_cover_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, "one")
    words = ["--runs", str(tmp_path), "--advice", str(advice(tmp_path, batch=99))]
    assert main(["compare", run.run_id, *words]) == 0
    assert "the advice has no prediction of its split" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "{", "[]", '{"muster_advice": 2, "rows": []}', '{"muster_advice": 1}'])
def test_a_file_that_is_no_advice_is_refused(
    tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = make_run(tmp_path, "one"), tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    assert main(["compare", run.run_id, "--runs", str(tmp_path), "--advice", str(path)]) != 0
    assert "write it with muster advise --output" in capsys.readouterr().err
