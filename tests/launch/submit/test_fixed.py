"""What a job derives from its world, and its result depends on, is fixed when the run is submitted."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.jobs.basics.files import read_lines, write_json
from muster.jobs.hosts.placement import Host, place
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.spec.filled import fixed
from muster.jobs.spec.job import Job
from muster.jobs.spec.rules import told_division
from muster.jobs.spec.train import TrainSettings

pytestmark = pytest.mark.command

GPT = {"d_model": 32, "d_ff": 64, "layers": 2, "heads": 2, "context": 16, "vocabulary": 64, "dropout": 0.1}
SHORT = {"data": "synthetic", "batch_size": 12, "steps": 6, "log_every": 1, "evaluate": False, "device": "cpu"}
TRAIN = {"model": GPT, **SHORT, "mode": "1f1b", "exact": True}
SAVING = {"nodes": 2, "threads_per_rank": "auto", "checkpoint": {"every_steps": 3}}


def muster(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "muster", *words, "--runs", str(root / "runs")]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100, cwd=root, check=False)


def begun(root: Path, train: dict[str, Any], name: str) -> RunDir:
    """Train on two nodes."""
    (root / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **SAVING, "train": train}))
    done = muster(root, "run", f"{name}.yaml")
    assert done.returncode == 0, done.stderr
    return RunDir(next((root / "runs").glob(f"{name}-*")))


def losses(run: RunDir) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_lines(run.metrics)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses(begun(tmp_path_factory.mktemp("whole"), TRAIN, "whole"))


RESUMED = ("--nodes", "1", "--set", "train.steps=6")
CHANGED = "1 rank instead of 2: batches are divided into 4 micro-batches instead of 8, which changes rounding"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_pipeline_with_exact_keeps_its_bits_on_fewer_ranks(tmp_path: Path, whole: dict[int, float]) -> None:
    run = begun(tmp_path, {**TRAIN, "steps": 3}, "new")
    old = RunDir(shutil.copytree(run.path, run.path.with_name(run.run_id.replace("new", "old"))))
    job = yaml.safe_load(run.job.read_text())
    assert job["train"].pop("microbatches") == 8
    assert job["threads_per_rank"] != "auto"
    old.job.write_text(yaml.safe_dump({**job, "threads_per_rank": "auto"}))  # as an earlier version submitted it
    refused = muster(tmp_path, "resume", run.run_id, "--set", "train.microbatches=4", "--set", "train.steps=6")
    assert (refused.returncode, "train.microbatches 8, but the job has 4" in refused.stderr) == (78, True)
    for each in (run, old):
        again = muster(tmp_path, "resume", each.run_id, *RESUMED)
        assert again.returncode == 0, again.stderr
        assert CHANGED not in again.stdout
        assert losses(each) == whole


@pytest.mark.ranks
@pytest.mark.slow
def test_a_pipeline_without_exact_says_what_changes_on_fewer_ranks(tmp_path: Path, whole: dict[int, float]) -> None:
    run = begun(tmp_path, {**TRAIN, "exact": False, "steps": 3}, "other")
    job = yaml.safe_load(run.job.read_text())
    assert "microbatches" not in job["train"]
    assert job["threads_per_rank"] == "auto"
    again = muster(tmp_path, "resume", run.run_id, *RESUMED)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count(CHANGED) == 1
    assert losses(run) != whole


def job_of(train: dict[str, Any], **more: Any) -> Job:
    settings = TrainSettings.model_validate({"model": "gpt-nano", "data": "synthetic", "batch_size": 64, **train})
    return Job.model_validate({"kind": "train", "settings": settings, **more})


@pytest.mark.parametrize(
    ("train", "wanted"),
    [
        *(({"mode": mode, "exact": True}, 16) for mode in ("gpipe", "1f1b", "interleaved", "zb1p", "zbv")),
        ({"mode": "model", "exact": True}, None),
        ({"mode": "1f1b"}, None),
        ({"mode": "1f1b", "exact": True, "microbatches": 5}, 5),
        ({"parallel": {"pipe": 2}, "exact": True}, 8),  # its own degrees decide
        ({"parallel": {"pipe": 4, "microbatches": 3}, "exact": True}, None),
        ({"mode": "zero1", "exact": True}, None),
    ],
)
def test_the_first_attempt_of_a_resumed_run_decides(tmp_path: Path, train: dict[str, Any], wanted: int | None) -> None:
    run = RunDir(tmp_path)
    run.attempt(0).path.mkdir()
    job = job_of(train, threads_per_rank="auto")
    write_json(
        run.attempt(0).placement,
        place(job_of(train, nodes=4), [Host(f"n{n}", f"10.0.0.{n}", 1) for n in range(4)]).to_json(),
    )
    found = fixed(job, 2, cores=8, run=run)
    assert found.settings.microbatches == wanted
    assert found.threads_per_rank == (2 if train.get("exact") else "auto")
    assert fixed(found, 1, cores=8, run=run) == found
    assert fixed(job, 4, cores=8) == found


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"mode": "ddp"}, "2 shards instead of 4"),
        ({"mode": "1f1b"}, "8 micro-batches instead of 16"),
        (
            {"parallel": {"data": 2, "pipe": 2}, "batch_size": 8},
            "1 shard instead of 2 and 8 micro-batches instead of 4",
        ),
        ({"mode": "tensor"}, ""),
        ({"mode": "zero1", "exact": True}, ""),
        ({"mode": "1f1b", "exact": True, "microbatches": 16}, ""),
    ],
)
def test_another_division_of_batches_is_told_in_one_line(train: dict[str, Any], told: str) -> None:
    line = told_division(job_of(train).settings, 4, 2)
    assert (told in line and "\n" not in line) if told else line == ""
