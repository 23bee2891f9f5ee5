"""Event files of trainings, read back with the real TensorBoard."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.files import read_lines
from muster.jobs.checkpoint.choose import newest_good
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.session.log import News
from muster.jobs.world.tensorboard import EventFiles
from muster.jobs.world.world import World
from support.resuming import VGG, attempt

ALONE = World(0, 1, None, torch.device("cpu"))
JOB = {**VGG, "mode": "single", "evaluate": True, "log_every": 3, "tensorboard": True}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read what TensorBoard would show of a folder: by tag, steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_event_files_have_the_metrics_and_a_resumed_run_continues_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert attempt(ALONE, str(tmp_path), JOB, checkpoint={"every_steps": 5}) == 0
    first = scalars(tmp_path / "tensorboard")
    newest = newest_good(run, mark=False)
    assert newest is not None
    shutil.rmtree(newest.folder.path)  # as if the run had failed before this one was saved
    assert attempt(ALONE, str(tmp_path), JOB, 1, checkpoint={"every_steps": 5}) == 0
    found = scalars(tmp_path / "tensorboard")
    assert set(first) == set(found) >= {"loss", "lr", "rate", "step_s", "evaluation/loss", "evaluation/accuracy"}
    rows = [row for row in read_lines(run.metrics) if "evaluation" not in row]
    assert [row["step"] for row in rows] == [*range(1, 9), 6, 7, 8]
    for name in ("loss", "lr", "rate", "step_s"):
        shown = {row["step"]: row[name] for row in rows}  # the newest attempt's
        assert found[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in sorted(shown.items())]
    assert [step for step, _ in found["evaluation/loss"]] == [6, 8]


def test_a_python_without_tensorboard_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(RefusedError, match="tensorboard: true needs the package tensorboard in the Python of rank 0; "):
        attempt(ALONE, str(tmp_path), JOB)
    assert not RunDir(tmp_path).metrics.exists()


def test_a_full_disk_ends_the_event_files_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").write_text("a file in the place of the folder")
    events = EventFiles(tmp_path, "tensorboard: true")
    for step in (1, 2):
        events.write([{"step": step, "time": 1.0, "loss": 0.5}])
    assert capsys.readouterr().err.count("no more event files are written in this attempt") == 1


def test_a_session_s_rows_are_shown_without_their_own_columns(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "step": 1,
        "steps": 4,
        "attempt": 0,
        "rank": 0,
        "time": 9.0,
        "step_s": 0.5,
        "unit": "steps/s",
    }
    events = EventFiles(tmp_path, "tensorboard=True")
    events.write(News([{**row, "rate": 2.0, "loss": 0.25, "other": None}]).logged)
    assert scalars(tmp_path / "tensorboard").keys() == {"step_s", "rate", "loss"}
