"""The wrappers over NCCL. `pytest -m gpu` on a machine with at least two CUDA devices."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from muster import ddp
from muster.jobs.world.world import World
from support.data_parallel import (
    WRAPPERS,
    backwards,
    gradients_apart,
    gradients_of,
    one_process,
    wrap,
    wrong_gradients,
    wrong_start,
    wrong_training,
)
from support.data_parallel_models import CASES, ToyModel
from support.gpus import over

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

EVERY_WRAPPER = pytest.mark.parametrize("wrapper", WRAPPERS)


def all_checks(world: World, wrapper: str, folder: str) -> list[str]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    problems = []
    with over("nccl", world, folder) as on_gpu:
        for case in CASES:
            checks = {
                "start": wrong_start(on_gpu, wrapper, case),
                "gradients": wrong_gradients(on_gpu, wrapper, case),
                "exact": wrong_gradients(on_gpu, wrapper, case, shards=2, exact=True),
            }
            problems += [f"{case}, {check}: {each}" for check, found in checks.items() for each in found]
        for how in ("sgd", "adamw"):
            problems += [f"gpt by {how}: {each}" for each in wrong_training(on_gpu, wrapper, "gpt", how)]
        problems += wrong_gradients(on_gpu, wrapper, "toy", communication_dtype="bfloat16")
    return problems


@EVERY_WRAPPER
def test_every_module_has_the_gradients_of_one_process_on_gpus(on_ranks, tmp_path: Path, wrapper):
    assert on_ranks(2, all_checks, deadline_s=55.0, group=False, wrapper=wrapper, folder=str(tmp_path)) == [[]] * 2


def refused(world: World, folder: str) -> list[str]:
    said = []
    with over("nccl", world, folder) as on_gpu:
        toy = ToyModel().to(on_gpu.device)
        if world.rank == 1:
            toy.fc2 = torch.nn.Linear(20, 6, bias=False).to(on_gpu.device)
        with pytest.raises(ValueError, match="the ranks' modules or wrappers differ") as error:
            ddp.BucketedDDP(toy, on_gpu.group)
        said.append(str(error.value))
        model = wrap(on_gpu, "BucketedDDP", "never used", find_unused_parameters=False)
        with pytest.raises(RuntimeError, match="no gradient on any rank: sometimes; ") as unused:
            backwards(on_gpu, model, CASES["never used"])
        said.append(str(unused.value))
    return said


def test_ranks_that_differ_are_told_over_nccl_too(on_ranks, tmp_path: Path):
    there, here = on_ranks(2, refused, deadline_s=55.0, group=False, folder=str(tmp_path))
    assert "fc2.weight (5, 20) float32 trainable on rank 0 (here) but parameter fc2.weight (6, 20)" in there[0]
    assert "on rank 0 but parameter fc2.weight (6, 20) float32 trainable on rank 1 (here)" in here[0]


def recorded(world: World, wrapper: str, folder: str) -> list[str]:
    """Record a backward with its collectives into a CUDA graph, then replay it with other inputs."""
    with over("nccl", world, folder) as on_gpu:
        model = wrap(on_gpu, wrapper, "chain", **({"bucket_size_mb": 1 / 32} if wrapper == "BucketedDDP" else {}))
        inputs = torch.zeros(3, 64, device=on_gpu.device)

        def step() -> None:
            model(inputs).square().sum().backward()
            model.finish_gradient_synchronization()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
                model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        inputs.copy_(torch.randn(3, 64, generator=torch.Generator().manual_seed(100 + world.rank)))
        graph.replay()
        torch.cuda.synchronize()
        serial = CASES["chain"].build(1).to(on_gpu.device)
        wanted = one_process(CASES["chain"], serial, range(world.size))
        found = gradients_apart(gradients_of(model.module), wanted, 2 * world.size)
        del graph  # before the communicator that it uses
        dist.barrier()
    return found


@pytest.mark.parametrize("wrapper", ["BucketedDDP", "FlatAllReduce", "OverlappedDDP"])
def test_a_step_with_its_collectives_can_be_recorded_into_a_cuda_graph(on_ranks, tmp_path: Path, wrapper):
    assert on_ranks(2, recorded, deadline_s=55.0, group=False, wrapper=wrapper, folder=str(tmp_path)) == [[]] * 2
