"""`muster memory` and `muster bench model` of a model that a user's file makes, as a user types them."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.jobs.basics.boot import CODE_ROOT
from muster.launch.bench import ranks_python
from muster.launch.cli import main
from support.programs import Programs

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.usefixtures("forked_ranks")]


@pytest.fixture(autouse=True)
def _forks_are_asked(monkeypatch: pytest.MonkeyPatch, programs: Programs, tmp_path: Path) -> None:
    """What is asked of the ranks' Python is answered by a program that has imported torch already."""

    def run(argv: list[str], *, input: str, cwd: str, env: dict[str, str], **_: Any) -> Any:
        (tmp_path / "input").write_text(input)
        return programs.run("-m", argv[-1], stdin=tmp_path / "input", cwd=cwd, env=env)

    asked = SimpleNamespace(run=run, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(ranks_python, "subprocess", asked)


def said(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capfd.readouterr()
    assert main([*arguments]) == code, capfd.readouterr().err
    return capfd.readouterr().out


def test_a_made_model_is_counted_before_a_run_and_beside_its_measurement(tmp_path, capfd):
    own, runs = tmp_path / "own", ("--runs", str(tmp_path / "runs"))
    shutil.copytree(Path(CODE_ROOT, "muster/jobs/examples/own"), own)
    job, small = str(own / "model.yaml"), ("--set", "train.model.args={width: 32}")
    found = json.loads(said(capfd, "memory", job, *small, "--json"))
    rows = {row["mode"]: row for row in found["modes"]}
    assert rows["zero3"]["memory"]["parameters"] == found["parameters"] * 4 / 2
    assert rows["1f1b"]["memory"]["activations"] > 0
    assert (rows["tensor"]["memory"], rows["tensor"]["note"]) == (None, "the job has no model.plan")
    mode = ("--set", "train.mode=1f1b", "--set", "train.steps=3", *small)
    assert "the ranks assign layers to stages at the start" in said(capfd, "plan", job, *mode)
    said(capfd, "run", job, *mode, *runs)
    (first, second) = json.loads(said(capfd, "memory", *runs, "--json"))["ranks"]
    for rank in (first, second):
        ratios = {row["what"]: row["ratio"] for row in rank["rows"]}
        assert [ratios[kind] for kind in ("parameters", "gradients", "optimizer")] == [1.0, 1.0, 1.0]
    net = own / "model/net.py"
    net.write_text(net.read_text() + "\n")
    assert f"the formula's memory is unknown: {net} has changed since the run began" in said(capfd, "memory", *runs)


def test_the_model_of_a_job_is_timed(tmp_path, capfd):
    job = str(Path(CODE_ROOT, "muster/jobs/examples/own/model.yaml"))
    quick = ("--steps", "1", "--launches", "1", "--pass", "step", "--batch", "4", "--no-matmul")
    out = said(capfd, "bench", "model", job, *quick, "--device", "cpu", "--runs", str(tmp_path))
    row = next(line.split() for line in out.splitlines() if not line.startswith("#"))
    assert row[:6] == ["model/net.py:build", "step", "fp32", "145,866", "4", "-"]
    assert "rate: samples" in out
