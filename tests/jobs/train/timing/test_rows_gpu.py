"""Rows on a GPU: peak memory as torch counts it, what does not fit, and every way to compute."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.jobs.basics.rowlog import RowLog
from muster.jobs.timing.settings import TimingSettings
from muster.jobs.train.timing import work
from muster.jobs.train.timing.launch_manager import ModelTimer
from muster.jobs.world.world import World

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, pytest.mark.timeout(300)]
SMALL = {"batch": 4, "context": 64, "vocabulary": 1000, "warmup": 1, "steps": 3, "launches": 1}


def conduct(world: World, folder: str, asked: dict[str, Any], fraction: float = 1.0) -> list[Any]:
    """Time models on the first GPU; return the records. Only a share of its memory may be taken."""
    warnings.simplefilter("default")  # what torch remarks in a forked process is no error of a row
    claim = work.claim

    def claiming(device: torch.device) -> None:
        claim(device)
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    work.claim = claiming
    path = Path(folder) / "bench.jsonl"
    wanted = TimingSettings.model_validate({**SMALL, **asked})
    ModelTimer(wanted, torch.device("cuda", 0), RowLog(path, patient=False, say=print), name="test").run()
    return [json.loads(line) for line in path.read_text().splitlines()]


def timed(on_ranks, tmp_path, asked, **fields):
    (records,) = on_ranks(1, conduct, group=False, deadline_s=280.0, folder=str(tmp_path), asked=asked, **fields)
    return [record for record in records if record["record"] == "timed"], records


def test_peak_memory_is_weights_then_gradients_then_moments(on_ranks, tmp_path):
    passes = ["forward", "backward", "step"]
    rows, records = timed(on_ranks, tmp_path, {"model": "gpt-medium", "passes": passes, "batch": 1, "context": 16})
    assert records[0]["machine"]["gpu"]
    assert records[1]["flops_per_s"] > 1e12
    weights = 4 * rows[0]["parameters"]
    forward, backward, step = (row["peak_bytes"] / weights for row in rows)
    assert 1.0 <= forward < 1.5
    assert 2.0 <= backward < 2.5
    assert 4.0 <= step < 5.0


def test_what_does_not_fit_is_a_row_and_the_next_model_is_timed(on_ranks, tmp_path):
    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_initialized() else 139 * 2**30
    asked = {"model": ["gpt-xl", "gpt-nano"], "passes": "step", "matmul": False}
    rows, _ = timed(on_ranks, tmp_path, asked, fraction=4 * 2**30 / total)
    assert [row["state"] for row in rows] == ["memory", "ok"]
    assert "of this GPU's" in rows[0]["reason"]


@pytest.mark.parametrize("more", [{}, {"compile": True}, {"activation_checkpointing": True}])
def test_every_precision_has_a_row(on_ranks, tmp_path, more):
    precisions = ["fp32", "bf16", "fp16", "pure_bf16"]
    rows, _ = timed(on_ranks, tmp_path, {"model": "gpt-nano", "passes": "step", "precision": precisions, **more})
    assert [(row["precision"], row["reason"]) for row in rows] == [(each, "") for each in precisions]
    assert {row["state"] for row in rows} == {"ok"}
