"""Mode asynchronous as a user starts it: losing a worker without a shard, metrics, compare, verify."""

import json
import os
import signal
from pathlib import Path

import pytest

from muster.jobs.basics import exits
from muster.jobs.basics.files import read_lines
from muster.launch.cli import main
from support.live import LiveRun, wait_until

pytestmark = [pytest.mark.command, pytest.mark.ranks, pytest.mark.slow]

STEPS = 60
JOB = f"""
nodes: 3
train:
  model: gpt-nano
  data: python-source
  mode: asynchronous
  servers: 2
  batch_size: 12
  steps: {STEPS}
  log_every: 1
  evaluate: false
"""


def test_a_killed_worker_without_a_shard_costs_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveRun(tmp_path, JOB)
    wait_until(lambda: sum(1 for _ in read_lines(live.run.metrics)) >= 5, "five steps")
    [pid] = [pid for row in live.events("started") for rank, pid in row["ranks"] if rank == 2]
    os.kill(pid, signal.SIGKILL)
    assert live.end() == 0, live.err
    assert "was killed by SIGKILL; the other ranks continue without it" in live.err
    rows = list(read_lines(live.run.metrics))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(0 <= row["staleness"] <= row["staleness_max"] for row in rows)
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    assert live.left() == []
    assert main(["plot", "loss_time", "--runs", str(live.run.path.parent), live.run.run_id, "--json"]) == 0
    [series] = json.loads(capsys.readouterr().out)["plot"]["series"]
    assert len(series["x"]) == STEPS


def test_verify_compares_one_worker_and_says_why_not_several(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB.replace("  servers: 2\n", ""))
    assert main(["verify", "job.yaml", "--steps", "2"]) == exits.REFUSED
    assert "depends on the order in which they finish, so no two runs are equal" in capfd.readouterr().err
    assert main(["verify", "job.yaml", "--steps", "2", "--set", "nodes=1"]) == 0
    assert "class bitwise: asynchronous on 1 rank" in capfd.readouterr().out


def test_checkpoints_and_more_servers_than_ranks_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    assert main(["plan", "job.yaml", "--set", "checkpoint.every_steps=5"]) == exits.BAD_JOB
    assert "checkpoint cannot be combined with mode asynchronous yet" in capfd.readouterr().err
    assert main(["plan", "job.yaml", "--set", "train.servers=4"]) == exits.REFUSED
    assert "train.servers: 4 is more than the 3 ranks of the job" in capfd.readouterr().err
