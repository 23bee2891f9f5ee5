"""A pipeline over NCCL trains like a loop on one GPU. `pytest -m gpu` on a machine with at least two CUDA devices.

`test_pipeline.py` tests the same on CPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

from muster.jobs.world.world import World
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.tables import schedule
from muster.pipe.wires import connections
from support.gpus import over
from support.pipelines import Case, wrong_training
from support.refusals import told_by

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

DEADLINE_S = 100.0
EXACT = {"exact": True}
CASES = [
    Case("vgg", "1f1b", 8, (11, 8, 3)),
    Case("vgg", "interleaved", 4, (9, 9)),
    Case("gpt", "gpipe", 5, (11, 4), {"recompute": True}),
    Case("gpt", "zbv", 4, (9, 8), EXACT),
    Case("vgg", "zb1p", 4, (9, 8), EXACT),
    Case("odd", "1f1b", 3, (7, 2, 7), {"cuts": (0, 6)}),
    Case("odd", "interleaved", 2, (3, 3), {"cuts": (0, 5, 6, 8)}),
    Case("odd", "gpipe", 3, (3, 3), {"cuts": (0, 5), "recompute": True}),
]
GRAPHED = [
    Case("vgg", "1f1b", 4, (8, 8, 8, 7, 7, 7), {"cuda_graphs": True}),
    Case("gpt plain", "interleaved", 4, (8, 8, 8), {"cuda_graphs": True}),
    Case("gpt plain", "zb1p", 4, (8, 7, 8, 7), {"cuda_graphs": True, "exact": True}),
    Case("gpt plain", "zbv", 4, (8, 8, 8), {"cuda_graphs": True, "exact": True}),
]


def wrong(world: World, folder: str, copied: bool) -> list[str]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    with over("nccl", world, folder) as on_gpu, wire_of(copied=copied):
        return [f"{case}: {each}" for case in CASES for each in wrong_training(on_gpu, case)]


def wrong_graphed(world: World, folder: str) -> list[str]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    with over("nccl", world, folder) as on_gpu:
        return [f"{case}: {each}" for case in GRAPHED for each in wrong_training(on_gpu, case)]


@contextmanager
def wire_of(*, copied: bool) -> Iterator[None]:
    """Check that pipelines copy from GPU to GPU. Without `copied`, make them use NCCL instead."""
    real = connections.peers_of

    def found(*arguments: Any) -> Any:
        wire = real(*arguments)
        assert wire is not None
        return wire if copied else None

    with patch.object(connections, "peers_of", found):
        yield


@pytest.mark.parametrize("copied", [True, False])
def test_every_schedule_trains_as_a_loop_on_one_gpu(on_ranks, tmp_path: Path, copied: bool):
    found = on_ranks(2, wrong, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path), copied=copied)
    assert found == [[]] * 2


def test_recorded_schedules_train_as_a_loop_on_one_gpu(on_ranks, tmp_path: Path):
    found = on_ranks(2, wrong_graphed, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path))
    assert found == [[]] * 2


class Failing(nn.Linear):
    """Fails in its third forward."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 3:
            raise ValueError("burst")
        return super().forward(x)


def failing(world: World, folder: str, copied: bool) -> Any:
    with over("nccl", world, folder) as on_gpu, wire_of(copied=copied):
        layers = nn.Sequential(nn.Linear(4, 4), Failing(4, 4)).to(on_gpu.device)
        pipeline = Pipeline(layers, schedule("1f1b", 2, 4), loss=functional.cross_entropy, process_group=on_gpu.group)
        inputs, targets = torch.randn(8, 4, device=on_gpu.device), torch.zeros(8, dtype=torch.int64).to(on_gpu.device)
        return told_by(lambda: pipeline.step(inputs, targets))


@pytest.mark.parametrize("copied", [True, False])
def test_a_stage_that_raises_ends_both_ranks(on_ranks, tmp_path: Path, copied: bool):
    found = on_ranks(2, failing, deadline_s=40.0, group=False, folder=str(tmp_path), copied=copied)
    assert found == ["StageFailedError: stage 1 on rank 1 failed: ValueError: burst", "ValueError: burst"]
