"""Rings, trees and exchanges over NCCL. `pytest -m gpu` on a machine with at least two CUDA devices."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from muster.ddp.primitives import columns
from muster.jobs.world.world import World
from support.gpus import over
from support.primitives import check_all

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def check(world: World, folder: str, segments: list[int] | None) -> None:
    with over("nccl", world, folder) as on_gpu:
        if segments:
            columns.SEGMENT_BYTES["cuda"] = (segments[0], segments[1])
        check_all(on_gpu)


@pytest.mark.parametrize("segments", [None, [2**10, 2**14]])
def test_every_primitive_gives_what_one_process_would_on_gpus(on_ranks, tmp_path: Path, segments):
    on_ranks(2, check, deadline_s=55.0, group=False, folder=str(tmp_path), segments=segments)


def check_on_all(world: World, folder: str) -> None:
    with over("nccl", world, folder) as on_gpu:
        check_all(on_gpu)
        some = dist.new_group(list(range(1, world.size)))  # its rank 0 is rank 1
        if (rank := dist.get_rank(some)) >= 0:
            dist.all_reduce(torch.zeros(1, device=on_gpu.device), group=some)
            check_all(World(rank, world.size - 1, some, on_gpu.device))


@pytest.mark.gpu(2)
def test_every_primitive_works_on_all_gpus_of_the_machine_and_on_all_but_one(on_ranks, tmp_path: Path):
    on_ranks(torch.cuda.device_count(), check_on_all, deadline_s=55.0, group=False, folder=str(tmp_path))


def refused(world: World, folder: str) -> str:
    from muster.ddp import primitives

    with (
        over("gloo", world, folder) as on_gpu,
        pytest.raises(ValueError, match="gloo sends only from the CPU") as error,
    ):
        primitives.ring_all_reduce(torch.ones(4, device=on_gpu.device), on_gpu.group)
    return str(error.value)


def test_gloo_is_not_asked_to_send_from_a_gpu(on_ranks, tmp_path: Path):
    said = on_ranks(2, refused, group=False, folder=str(tmp_path))
    assert said[1] == "tensor[0] is on cuda:1: gloo sends only from the CPU; use NCCL, or copy it"
