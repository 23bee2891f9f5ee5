"""A real run with a slow rank: its supervisor names it while the run goes on."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.jobs.runfolder.rundir import RunDir, find_run
from muster.launch.common.event_rows import typed_lines
from muster.launch.records.runstate import read_state

pytestmark = [pytest.mark.command, pytest.mark.slow]

MODEL = """
import os, time
from torch import nn

class Slow(nn.Sequential):
    def forward(self, images):
        time.sleep(0.25 if os.environ["RANK"] == "1" else 0.01)
        return super().forward(images)

def build():
    return Slow(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
"""
TRAIN = {"data": "digits", "mode": "bucketed", "batch_size": 16, "steps": 100_000, "evaluate": False}


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a training of three ranks, of which rank 1 sleeps longest."""
    (tmp_path / "model.py").write_text(MODEL)
    job = {"nodes": 3, "workdir": ".", "train": {**TRAIN, "model": {"make": "model.py:build"}}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    argv = [sys.executable, "-m", "muster", "run", str(tmp_path / "job.yaml"), "--runs", str(tmp_path / "runs")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as started:
        yield started
        started.terminate()


@pytest.mark.timeout(300)
def test_the_supervisor_names_the_slow_rank_of_a_real_run(process: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert process.stderr is not None
    said = next((line for line in process.stderr if "slow: " in line), "")
    assert "slow: node 1" in said
    assert "rank 1" in said
    run: RunDir = find_run(tmp_path / "runs", None)
    assert [each.ranks for each in read_state(run).stragglers] == [(1,)]
    assert [row["event"] for row in typed_lines(run.events)].count("slow") == 1
