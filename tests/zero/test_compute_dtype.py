"""Stage 3 with a compute dtype: 16-bit products of float32 parameters, without any other part of Muster."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 5))
    layers[2].bias.requires_grad_(False)
    return layers


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7 * step + rank))


class Reference:
    """The same training in every process: float32 parameters, rounded for each forward; gradients averaged."""

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        self.masters, self.ranks, self.dtype = build(), ranks, dtype
        self.optimizer = torch.optim.AdamW([p for p in self.masters.parameters() if p.requires_grad], lr=1e-2)

    def output(self, inputs: Tensor) -> tuple[Tensor, nn.Module]:
        rounded = build().to(self.dtype)
        rounded.load_state_dict(self.masters.state_dict())
        return rounded(inputs.to(self.dtype)), rounded

    def step(self, step: int) -> None:
        for rank in range(self.ranks):
            out, rounded = self.output(batch(step, rank))
            out.float().square().mean().backward()
            for master, used in zip(self.masters.parameters(), rounded.parameters(), strict=True):
                if used.grad is not None:
                    mean = used.grad.float() / self.ranks
                    master.grad = mean if master.grad is None else master.grad + mean
        self.optimizer.step()
        self.optimizer.zero_grad()


def problems_of(world: World, dtype_name: str) -> list[str]:
    dtype = getattr(torch, dtype_name)
    problems: list[str] = []

    def check(what: str, holds: bool) -> None:
        problems.extend([what] * (not holds))

    def same(what: str, state: dict[str, Any], wanted: dict[str, Any], tolerance: float = 0.0) -> None:
        for name, each in wanted.items():
            check(f"{what}: {name} is {state[name].dtype}", state[name].dtype == torch.float32)
            apart = float((state[name] - each).abs().max())
            check(f"{what}: {name} differs by {apart:.1e}", apart <= tolerance)

    reference = Reference(world.size, dtype)
    model = ShardedDataParallel(build(), stage=3, compute_dtype=dtype, communication_dtype=torch.float32)
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-2)
    same("before", model.state_dict(), reference.masters.state_dict())
    for step in range(3):
        out = model(batch(step, world.rank))
        if step == 0:
            wanted, _ = reference.output(batch(0, world.rank))
            check("the output has other bits", out.dtype == dtype and torch.equal(out, wanted))
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(step)
    same("after", model.state_dict(), reference.masters.state_dict(), 1e-3)
    other = build(5).state_dict()
    model.load_state_dict(other)
    same("loaded", model.state_dict(), other)
    with model.gather_full() as whole:
        check("products are not 16-bit", {each.dtype for each in whole.parameters()} == {dtype})
    for unsuitable in (pickle.dumps,):
        try:
            unsuitable(model)
            problems.append("was pickled")
        except TypeError as error:
            check(str(error), "save its state_dict(), or get the module with unwrap()" in str(error))
    same("unwrapped", model.unwrap().state_dict(), other)
    dist.barrier()
    return problems


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_stay_in_float32_and_products_are_in_the_compute_dtype(on_ranks, dtype: str) -> None:
    assert on_ranks(2, problems_of, dtype_name=dtype) == [[], []]


def test_it_works_on_one_rank_and_resumes(on_ranks) -> None:
    assert on_ranks(1, problems_of, dtype_name="bfloat16") == [[]]


def refusals(world: World) -> list[str]:
    found = []
    for settings in ({"stage": 2, "compute_dtype": torch.bfloat16}, {"stage": 3, "compute_dtype": torch.float32}):
        with pytest.raises(ValueError, match=r"compute_dtype must be .*, in stage 3; got"):
            ShardedDataParallel(build(), **settings)
    model = ShardedDataParallel(build(), stage=3, compute_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="masters=False contradicts compute_dtype"):
        model.optimizer(torch.optim.AdamW, masters=False)
    return found


def test_what_cannot_be_is_refused(on_ranks) -> None:
    assert on_ranks(1, refusals) == [[]]
