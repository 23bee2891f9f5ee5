"""A split GPT over NCCL. `pytest -m gpu` on a machine with two CUDA devices or more.

`test_training.py` and `test_rng_streams.py` test the same on CPUs.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from muster.jobs.world.world import World
from muster.pipe.mesh import AXES, Mesh
from muster.pipe.tensor.region import Region
from muster.pipe.tensor.rng_streams import OwnStream
from support.gpus import over
from support.tensor_parallel import CASES, Case, wrong_evaluation, wrong_training

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

DEADLINE_S = 55.0


def wrong_cases(world: World, folder: str) -> list[str]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    problems = []
    with over("nccl", world, folder) as on_gpu:
        for case in CASES:
            problems += [f"{case}: {each}" for each in wrong_training(on_gpu, case)]
        for case in CASES[1::4]:
            problems += [f"{case}: {each}" for each in wrong_evaluation(on_gpu, case)]
        problems += wrong_training(on_gpu, Case(dropout=0.3, attention_dropout=False))
    return problems


def test_a_split_gpt_trains_as_one_process_on_gpus(on_ranks, tmp_path: Path):
    assert on_ranks(2, wrong_cases, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path)) == [[]] * 2


def draws(world: World, folder: str) -> list[list[float]]:
    with over("nccl", world, folder) as on_gpu:
        dropout = nn.Dropout(0.5)
        OwnStream(dropout, Region(on_gpu.group))
        torch.manual_seed(3)
        common = [torch.rand((), device=on_gpu.device).item()]
        own = dropout(torch.ones(64, device=on_gpu.device)).tolist()
        common.append(torch.rand((), device=on_gpu.device).item())
        return [own, common]


def test_ranks_draw_numbers_of_their_own_on_gpus(on_ranks, tmp_path: Path):
    first, second = on_ranks(2, draws, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path))
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert first[1][0] != first[1][1]


def sums(world: World, folder: str) -> list[float]:
    with over("nccl", world, folder) as on_gpu:
        found = []
        for mesh in (Mesh(tensor=2), Mesh(data=2), Mesh(pipe=2)):
            groups = mesh.groups(on_gpu.group)
            for axis in AXES:
                total = torch.tensor([1.0 + world.rank], device=on_gpu.device)
                torch.distributed.all_reduce(total, group=getattr(groups, axis))
                found.append(total.item())
        return found


def test_groups_of_a_mesh_talk_on_gpus(on_ranks, tmp_path: Path):
    found = on_ranks(2, sums, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path))
    for rank, each in enumerate(found, start=1):
        assert each == [3, rank, rank, 3, rank, 3, rank, rank, rank, rank, 3, 3]
