"""Every operation on two GPUs, over NCCL and over gloo. `pytest -m gpu` on a machine with two CUDA devices or more."""

from pathlib import Path

import pytest

from muster.jobs.world.world import World
from support.gpus import over
from support.operations import cells, has_result, play, prepared, result_of

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

SIZES = [8, 300_000]
OF_NCCL = 18  # all of the catalog
OF_GLOO = 10  # not those of sends and receives


def play_all(world: World, folder: str, backend: str) -> list[int]:
    with over(backend, world, folder) as on_gpu:
        names = {cell.operation for cell in cells(on_gpu, [8], ["fp32"])}
        return [len(names), play(on_gpu, SIZES)]


@pytest.mark.parametrize(("backend", "operations"), [("nccl", OF_NCCL), ("gloo", OF_GLOO)])
def test_every_operation_is_right_on_gpus(on_ranks, tmp_path: Path, backend, operations):
    first, second = on_ranks(2, play_all, deadline_s=55.0, group=False, folder=str(tmp_path), backend=backend)
    assert first == second
    assert first[0] == operations


def play_large(world: World, folder: str) -> int:
    """Sizes at which our rings go in several columns."""
    with over("nccl", world, folder) as on_gpu:
        every = list(cells(on_gpu, [300 * 2**20], ["bf16"], ["sync"]))
        for cell in every:
            call = prepared(cell, on_gpu)
            call.fill()
            call.run()
            assert call.wrong() == 0, cell
            del call
        return len(every)


def test_large_results_are_right_on_gpus(on_ranks, tmp_path: Path):
    first, second = on_ranks(2, play_large, deadline_s=55.0, group=False, folder=str(tmp_path))
    assert first == second


def spoil(world: World, folder: str) -> list[str]:
    missed = []
    with over("nccl", world, folder) as on_gpu:
        for cell in cells(on_gpu, [300_000], ["fp32", "bf16"], ["sync"]):
            call = prepared(cell, on_gpu)
            call.fill()
            call.run()
            assert call.wrong() == 0, cell
            if has_result(on_gpu, cell):
                result_of(call)[-1] += 1
                missed += [str(cell)] * (call.wrong() != 1)
    return missed


def test_a_spoilt_element_is_counted_on_gpus(on_ranks, tmp_path: Path):
    assert on_ranks(2, spoil, deadline_s=55.0, group=False, folder=str(tmp_path)) == [[], []]
