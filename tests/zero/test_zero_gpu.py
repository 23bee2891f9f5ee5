"""The sharded wrapper over NCCL, in all stages. `pytest -m gpu` on a machine with at least two CUDA devices.

`test_stages.py` tests the same on CPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel
from support.gpus import over
from support.sharded import Run, not_sharded, wrong_training

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

STAGES = (1, 2, 3)
EVERY_STAGE = pytest.mark.parametrize("stage", STAGES)
DEADLINE_S = 55.0
EXACT = {"exact": True}
RUNS = [
    {"case": "ragged", "how": "adamw", "shards": 2, "clip": 0.1, "settings": EXACT},
    {"case": "ragged", "how": "sgd", "groups": True},
    {"case": "gpt", "how": "adamw fused", "settings": EXACT},
    {"case": "gpt", "how": "adamw fused", "shards": 2},
    {"case": "masters", "how": "adamw fused"},
    {"case": "odd", "how": "sgd", "settings": {"communication_dtype": "bfloat16"}},
    {"case": "unused in odd shards", "how": "adamw"},
    {"case": "never used", "how": "sgd"},
]


@contextmanager
def on_gpus(world: World, folder: str) -> Iterator[World]:
    """Give this rank a GPU, and deterministic kernels."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    with over("nccl", world, folder) as on_gpu:
        yield on_gpu


def all_runs(world: World, stage: int, folder: str) -> list[str]:
    with on_gpus(world, folder) as on_gpu:
        runs = [Run(**given, stage=stage) for given in RUNS]
        return [f"{run}: {each}" for run in runs for each in wrong_training(on_gpu, run)]


@EVERY_STAGE
def test_every_stage_trains_as_one_process_on_gpus(on_ranks, tmp_path: Path, stage):
    found = on_ranks(2, all_runs, deadline_s=DEADLINE_S, group=False, stage=stage, folder=str(tmp_path))
    assert found == [[]] * 2


def shares(world: World, folder: str) -> list[str]:
    with on_gpus(world, folder) as on_gpu:
        return [f"stage {stage}: {each}" for stage in STAGES for each in not_sharded(on_gpu, stage)]


def test_every_rank_holds_its_share_on_gpus(on_ranks, tmp_path: Path):
    assert on_ranks(2, shares, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path)) == [[]] * 2


WIDTH, LAYERS = 2048, 12  # 16 MB per layer
MB = 2**20


def allocated(world: World, folder: str) -> list[dict[str, float]]:
    """Return for each stage the MB allocated after a step, and at most during one."""
    found = []
    with on_gpus(world, folder) as on_gpu:
        warm = nn.Linear(WIDTH, WIDTH).to(on_gpu.device)
        warm(torch.randn(8, WIDTH, device=on_gpu.device)).sum().backward()  # cuBLAS keeps 32 MB per thread
        for stage in STAGES:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(on_gpu.device)
            model = ShardedDataParallel(layers, on_gpu.group, stage=stage, bucket_size_mb=16.0)
            optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
            for _ in range(3):
                torch.cuda.reset_peak_memory_stats()
                model(torch.randn(8, WIDTH, device=on_gpu.device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                model.synchronize()
            torch.cuda.synchronize()
            after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            found.append({"after": (after - before) / MB, "peak": (peak - before) / MB})
            del layers, model, optimizer
    return found


def test_the_allocator_has_given_out_what_the_stage_says(on_ranks, tmp_path: Path):
    """With P MB on two ranks: parameters P or P / 2, gradients P or P / 2 until dropped, states P."""
    whole = WIDTH * WIDTH * 4 * LAYERS / MB
    for one, two, three in on_ranks(2, allocated, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path)):
        assert one["after"] == pytest.approx(whole * 3, rel=0.1)  # it keeps its flat gradients
        assert two["after"] == pytest.approx(whole * 2, rel=0.1)
        assert three["after"] == pytest.approx(whole * 1.5, rel=0.1)
        assert two["peak"] < one["peak"]
        assert two["peak"] < whole * 2.5 + 5 * 16  # shards of gradients, two buckets, and gradients being packed
        assert three["peak"] < whole * 2 + 10 * 16


def freed_too_early(world: World, folder: str) -> list[str]:
    """Overwrite memory that the host has freed while the other stream is running: no kernel may still read it.

    Checks that the sum of ones over two ranks is not garbage. A long kernel before the backward lets the host run far
    ahead of both streams.
    """
    problems = []
    with on_gpus(world, folder) as on_gpu:
        for stage, exact in product(STAGES, (False, True)):
            torch.manual_seed(0)
            layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).to(on_gpu.device)
            for each in layers.parameters():
                nn.init.eye_(each)
            model = ShardedDataParallel(layers, on_gpu.group, stage=stage, exact=exact, bucket_size_mb=1.0)
            optimizer = model.optimizer(torch.optim.SGD, lr=0.0)
            for _ in range(3):
                torch.cuda._sleep(50_000_000)
                model(torch.ones(1, 512, device=on_gpu.device)).sum().backward()
                garbage = [torch.full((512, 512), float("nan"), device=on_gpu.device) for _ in range(64)]
                del garbage
                wrong = [name for name, each in model.full_gradients().items() if not bool((each == 1.0).all())]
                problems += [f"stage {stage}, exact {exact}: {name}" for name in wrong]
                optimizer.step()
                optimizer.zero_grad()
    return problems


def test_no_memory_is_used_anew_while_another_stream_reads_it(on_ranks, tmp_path: Path):
    assert on_ranks(2, freed_too_early, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path)) == [[]] * 2


def silent_steps(world: World, folder: str) -> list[Any]:
    """Return whether steps after the first make the host wait."""
    done: list[Any] = []
    with on_gpus(world, folder) as on_gpu:
        for stage in (1, 2):
            layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(on_gpu.device)
            model = ShardedDataParallel(layers, on_gpu.group, stage=stage, bucket_size_mb=0.02)
            optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
            inputs = torch.randn(8, 64, device=on_gpu.device)
            for step in range(3):
                torch.cuda.set_sync_debug_mode("error" if step else "default")
                try:
                    optimizer.zero_grad()
                    model(inputs).square().mean().backward()
                    optimizer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            done.append(stage)
    return done


def test_no_step_but_the_first_makes_the_host_wait(on_ranks, tmp_path: Path):
    assert on_ranks(2, silent_steps, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path)) == [[1, 2]] * 2
