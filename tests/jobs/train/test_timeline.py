"""Timelines of a run: written row by row, on clocks that are compared again and again."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.train import timeline
from pipe.schedules.measured import Record
from pipe.schedules.tables import schedule


def test_clocks_are_compared_again_for_they_drift(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    compared: list[Any] = []
    used: list[Any] = []
    monkeypatch.setattr(timeline, "clock_offsets", lambda group: compared.append(group) or [len(compared)])
    records = [Record(0, "F", 0, 0, 0.5, 0.75), Record(0, "B", 0, 0, 0.75, 1.0)]
    monkeypatch.setattr(timeline, "gather", lambda spans, group, offsets: used.append(offsets) or records)
    pipeline: Any = SimpleNamespace(spans=[], schedule=schedule("1f1b", 1, 4))
    recorder = timeline.Timeline(pipeline, None, tmp_path / "timeline.jsonl")
    for step in range(2 * timeline.COMPARED + 1):
        recorder.record(step)
    assert used == [[1]] * timeline.COMPARED + [[2]] * timeline.COMPARED + [[3]]
    rows = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(2 * timeline.COMPARED + 1))
    assert rows[0]["microbatches"] == 1  # of a short batch
    assert rows[0]["records"][1] == [0, "B", 0, 0, 0.75, 1.0]
