"""Rows of whole epochs: what they sum up, and when they are written."""

import json
from pathlib import Path

import pytest

from muster.jobs.basics.rowlog import RowLog
from muster.jobs.train.epochs import EpochLog
from support.resuming import VGG, attempt

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("log_every", [1, 4])
def test_an_epochs_row_is_the_sum_of_its_steps_with_the_evaluation_after_it(on_ranks, tmp_path, log_every) -> None:
    job = {**VGG, "mode": "ddp", "batch_size": 512, "steps": 8, "evaluate": True, "log_every": log_every}
    assert on_ranks(2, attempt, folder=str(tmp_path), settings=job) == [0, 0]
    rows = read(tmp_path / "metrics.jsonl")
    epochs = read(tmp_path / "epochs.jsonl")
    steps = [row for row in rows if not row.get("evaluation")]
    assert [row["epoch"] for row in epochs] == list(range(1, steps[-1]["epoch"] + (steps[-1]["step"] % 3 == 0)))
    for row in epochs:
        of_epoch = [step for step in steps if step["epoch"] == row["epoch"]]
        assert (row["from_step"], row["step"]) == (of_epoch[0]["step"], of_epoch[-1]["step"])
        assert row["seconds"] == pytest.approx(sum(step["step_s"] for step in of_epoch))
        samples = [step["rate"] * step["step_s"] for step in of_epoch]
        assert row["rate"] == pytest.approx(sum(samples) / row["seconds"])
        weighted = sum(step["loss"] * number for step, number in zip(of_epoch, samples, strict=True))
        assert row["loss"] == pytest.approx(weighted / sum(samples))
        (evaluation,) = (each for each in rows if each.get("evaluation") and each["step"] == row["step"])
        assert (row["evaluation_loss"], row["evaluation_accuracy"]) == (evaluation["loss"], evaluation["accuracy"])


def test_without_its_evaluation_a_row_is_written_at_the_end(tmp_path: Path) -> None:
    log = EpochLog(RowLog(tmp_path / "epochs.jsonl", patient=False, say=print), {}, evaluates=True, samples=8)
    log.add(1, 1, 4, samples=4, loss=2.0, seconds=1.0)
    log.add(1, 2, 8, samples=4, loss=4.0, seconds=1.0)
    log.add(2, 3, 4, samples=4, loss=float("nan"), seconds=1.0)
    assert log.write(10, "tokens/s") == []
    (row,) = log.write(10, "tokens/s", at_end=True)
    assert (row["loss"], row["rate"], row["step"]) == (3.0, 40.0, 2)
    log.add(2, 4, 8, samples=4, loss=1.0, seconds=1.0)
    log.evaluated(2, {"loss": 1.5})
    (row,) = log.write(10, "tokens/s")
    assert (row["loss"], row["evaluation_loss"]) == (None, 1.5)
