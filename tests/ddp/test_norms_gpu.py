"""Norms on GPUs: the same bits as on a CPU, for any distribution of elements, without host waits. `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from muster.ddp.norms import clip_by, plain_norm, reproducible_norm
from muster.jobs.world.world import World
from support.gpus import over

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def gradients(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3_000_001, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** (values * 3)).to(dtype)


def wrong_on_gpus(world: World, folder: str) -> list[str]:
    wrong = []
    with over("nccl", world, folder) as on_gpu:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            whole = gradients(dtype)
            wanted = reproducible_norm([whole], reduce=False)
            mine = [whole[world.rank :: world.size].to(on_gpu.device), whole[:0].to(on_gpu.device)]
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            found = reproducible_norm(mine, on_gpu.group, reduce=True)
            near = plain_norm(mine, on_gpu.group, reduce=True)
            clip_by(mine, found, 1.0)
            torch.cuda.set_sync_debug_mode("default")
            if found.item() != wanted.item():
                wrong.append(f"{dtype}: {found.item()!r}, on a CPU {wanted.item()!r}")
            if near.item() != pytest.approx(wanted.item(), rel=1e-5):
                wrong.append(f"{dtype}: plain norm {near.item()!r}, wanted {wanted.item()!r}")
            on_gpu_whole = whole.to(on_gpu.device)
            clip_by([on_gpu_whole], wanted.to(on_gpu.device), 1.0)
            if not torch.equal(mine[0], on_gpu_whole[world.rank :: world.size]):
                wrong.append(f"{dtype}: a shard is clipped to other bits than the whole")
        nothing = reproducible_norm([], on_gpu.group, reduce=True)
        if nothing.item() != 0.0 or not nothing.is_cuda:
            wrong.append(f"without a tensor: {nothing}")
    return wrong


def test_norms_have_the_bits_of_a_cpu_and_make_the_host_wait_for_nothing(on_ranks, tmp_path: Path):
    found = on_ranks(2, wrong_on_gpus, deadline_s=55.0, group=False, folder=str(tmp_path))
    assert found == [[]] * 2
