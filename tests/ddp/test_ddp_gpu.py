"""Steps of the wrappers over NCCL: one launch per bucket, and no waits of the host. `pytest -m gpu`, two GPUs.

`test_wrappers_gpu.py` tests the results.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from muster import ddp
from muster.jobs.world.world import World
from support.data_parallel import WRAPPERS
from support.gpus import over

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]

RECORDABLE = [wrapper for wrapper in WRAPPERS if wrapper != "GatherScatter"]
ON_ONE_AND_TWO = pytest.mark.parametrize("world_size", [1, 2])
DEADLINE_S = 55.0


@contextmanager
def on_gpus(world: World, folder: str) -> Iterator[World]:
    """Give this rank a GPU and deterministic kernels."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    with over("nccl", world, folder) as on_gpu:
        yield on_gpu


@pytest.fixture
def wrong_on(on_ranks: Any, tmp_path: Path) -> Any:
    """Return a function that returns what is wrong on each rank. Starting ranks takes longer than their work."""

    def call(world_size: int, function: Any, **arguments: Any) -> list[Any]:
        found: list[Any] = on_ranks(
            world_size, function, deadline_s=DEADLINE_S, group=False, folder=str(tmp_path), **arguments
        )
        return found

    return call


class Layers(nn.Sequential):
    """Layers that can be recorded, without anything on the CPU."""

    def __init__(self, seed: int, device: torch.device) -> None:
        torch.manual_seed(seed)
        super().__init__(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())))
        self.to(device)


def batch(world: World, step: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + world.rank)).to(world.device)


def stepper(wrapper: str, world: World) -> Any:
    model = getattr(ddp, wrapper)(Layers(1, world.device), world.group)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(0.01, device=world.device), fused=True, capturable=True
    )

    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs).square().mean()
        loss.backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        return loss.detach()

    return model, step


def recorded_apart(on_gpu: World, wrapper: str, steps: int = 6, eager: int = 3) -> list[str]:
    plain, train = stepper(wrapper, on_gpu)
    wanted = [float(train(batch(on_gpu, step))) for step in range(steps)]
    graphed, train_again = stepper(wrapper, on_gpu)
    stream, graph, inputs = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.empty_like(batch(on_gpu, 0))
    found = []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found += [float(train_again(batch(on_gpu, step))) for step in range(eager)]
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        loss = train_again(inputs)
    for step in range(eager, steps):
        inputs.copy_(batch(on_gpu, step))
        graph.replay()
        found.append(float(loss))
    problems = [] if found == wanted else [f"{wrapper}: losses {found} where {wanted} were wanted"]
    pairs = zip(plain.named_parameters(), graphed.parameters(), strict=True)
    return problems + [f"{wrapper}: {name}" for (name, one), other in pairs if not torch.equal(one, other)]


def all_recorded_apart(world: World, folder: str) -> list[str]:
    with on_gpus(world, folder) as on_gpu:
        return [each for wrapper in RECORDABLE for each in recorded_apart(on_gpu, wrapper)]


@ON_ONE_AND_TWO
def test_a_step_can_be_recorded_with_its_communication_and_replayed(wrong_on, world_size):
    assert wrong_on(world_size, all_recorded_apart) == [[]] * world_size


def silent_steps(world: World, folder: str) -> list[str]:
    done = []
    with on_gpus(world, folder) as on_gpu:
        for wrapper in RECORDABLE:
            _, train = stepper(wrapper, on_gpu)
            batches = [batch(on_gpu, step) for step in range(4)]
            train(batches[0])  # the first one exchanges which parameters are used
            torch.cuda.set_sync_debug_mode("error")
            try:
                losses = [train(each) for each in batches[1:]]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            done += [wrapper] if all(float(loss) > 0.0 for loss in losses) else []
    return done


def test_no_step_but_the_first_makes_the_host_wait(wrong_on):
    assert wrong_on(2, silent_steps) == [RECORDABLE] * 2
