"""What a rank tells its rank parent: lines on a pipe, which never hold the rank up."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from muster.jobs.hosts import ranks
from muster.jobs.node.reports import Reporter

Pipe = tuple[int, Reporter]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reading, writing = os.pipe()
    yield reading, Reporter({"MUSTER_STATUS_FD": ranks.descriptor_text(writing)})
    for end in (reading, writing):
        try:
            os.close(end)
        except OSError:  # a test closed it
            continue


def told(reading: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in os.read(reading, 65536).decode().splitlines()]


def test_reports_are_lines_of_json(pipe: Pipe) -> None:
    reading, reporter = pipe
    reporter.arrived()
    reporter.joined()
    reporter.progress(step=20, steps=196, loss=2.5, rate=812.0, unit="samples/s")
    reporter.failed(ValueError("two\n  lines"), peer=True)
    rows = told(reading)
    assert rows[:3] == [
        {"report": "arrived"},
        {"report": "joined"},
        {"report": "progress", "step": 20, "steps": 196, "loss": 2.5, "rate": 812.0, "unit": "samples/s"},
    ]
    assert {key: rows[3][key] for key in ("report", "kind", "message", "peer")} == {
        "report": "failed",
        "kind": "ValueError",
        "message": "two lines",
        "peer": True,
    }


def test_a_full_pipe_drops_whole_reports_and_does_not_block(pipe: Pipe) -> None:
    reading, reporter = pipe
    for _ in range(5000):
        reporter.joined()
    rows = told(reading)
    assert 0 < len(rows) < 5000
    assert all(row == {"report": "joined"} for row in rows)


def test_a_rank_parent_that_is_gone_is_no_error_of_the_rank(pipe: Pipe) -> None:
    reading, reporter = pipe
    kept = reporter.descriptor
    os.close(reading)
    reporter.joined()
    assert reporter.descriptor == kept is not None


@pytest.mark.parametrize("environ", [{}, {"MUSTER_STATUS_FD": ""}, {"MUSTER_STATUS_FD": "x"}])
def test_without_a_rank_parent_reports_go_nowhere(environ: dict[str, str]) -> None:
    reporter = Reporter(environ)
    reporter.joined()
    assert reporter.descriptor is None


def test_what_becomes_of_checkpoints_is_told_in_whole_rows(pipe: Pipe) -> None:
    reading, reporter = pipe
    reporter.loaded(step=40, seconds=0.2, checkpoint="step-00000040.a000")
    reporter.first_step(41)
    reporter.replayed(steps=12, seconds=3.1, compared=11, worst=0.0)
    reporter.saved(step=60, checkpoint="step-00000060.a001", stall_s=0.03, seconds=0.6, nbytes=9)
    reporter.missed(step=80, missed=1, message="disk\nfull")
    assert told(reading) == [
        {"report": "loaded", "step": 40, "seconds": 0.2, "checkpoint": "step-00000040.a000"},
        {"report": "first_step", "step": 41},
        {"report": "replayed", "steps": 12, "seconds": 3.1, "compared": 11, "worst": 0.0},
        {
            "report": "saved",
            "step": 60,
            "checkpoint": "step-00000060.a001",
            "stall_s": 0.03,
            "seconds": 0.6,
            "bytes": 9,
        },
        {"report": "missed", "step": 80, "missed": 1, "message": "disk full"},
    ]
