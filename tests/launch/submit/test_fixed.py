"""What a job derives from its world, and its result depends on, is fixed when the run is submitted."""

import shutil
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
from muster.launch.cli import main

pytestmark = pytest.mark.command

GPT = {"d_model": 32, "d_ff": 64, "layers": 2, "heads": 2, "context": 16, "vocabulary": 64, "dropout": 0.1}
SHORT = {"data": "synthetic", "batch_size": 12, "steps": 6, "log_every": 1, "evaluate": False, "device": "cpu"}
TRAIN = {"model": GPT, **SHORT, "mode": "1f1b", "exact": True}
SAVING = {"nodes": 2, "threads_per_rank": "auto", "checkpoint": {"every_steps": 3}}


def losses(run: RunDir) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_lines(run.metrics)}


RESUMED = ("--nodes", "1", "--from", "3")
CHANGED = "1 rank instead of 2: batches are divided into 4 micro-batches instead of 8, which changes rounding"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_pipeline_keeps_its_bits_on_fewer_ranks_if_exact_and_else_says_what_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def muster(*words: str) -> tuple[int, str, str]:
        code = main([*words, "--runs", str(tmp_path / "runs")])
        return (code, *capfd.readouterr())

    def begun(name: str, **train: Any) -> tuple[RunDir, dict[int, float], dict[str, Any]]:
        """Train on two nodes; return the run, its losses, and its job as it was fixed."""
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"name": name, **SAVING, "train": {**TRAIN, **train}}))
        code, _, err = muster("run", str(file))
        assert code == 0, err
        run = RunDir(next((tmp_path / "runs").glob(f"{name}-*")))
        return run, losses(run), yaml.safe_load(run.job.read_text())

    run, whole, job = begun("new")
    old = RunDir(shutil.copytree(run.path, run.path.with_name(run.run_id.replace("new", "old"))))
    assert job["train"].pop("microbatches") == 8
    assert job["threads_per_rank"] != "auto"
    old.job.write_text(yaml.safe_dump({**job, "threads_per_rank": "auto"}))  # as an earlier version submitted it
    code, _, err = muster("resume", run.run_id, "--from", "3", "--set", "train.microbatches=4")
    assert (code, "train.microbatches 8, but the job has 4" in err) == (78, True)
    for each in (run, old):
        code, out, err = muster("resume", each.run_id, *RESUMED)
        assert code == 0, err
        assert CHANGED not in out
        assert (len(list(read_lines(each.metrics))), losses(each)) == (6 + 3, whole)

    other, _, job = begun("other", exact=False, steps=3)
    assert "microbatches" not in job["train"]
    assert job["threads_per_rank"] == "auto"
    code, out, err = muster("resume", other.run_id, *RESUMED, "--set", "train.steps=6")
    assert code == 0, err
    assert out.count(CHANGED) == 1
    assert losses(other) != whole


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
