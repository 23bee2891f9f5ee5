"""The norm of all gradients: its bits do not depend on who holds which elements; it equals torch's in float64."""

import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.ddp import norms
from muster.ddp.norms import clip_by, plain_norm, reproducible_norm
from muster.jobs.world.world import World

INF, NAN = math.inf, math.nan
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64)


def mixed(count: int = 5000) -> torch.Tensor:
    """Return magnitudes from 1e-30 to 1e30, including the smallest of float32."""
    values = numbers(count) * 10.0 ** (numbers(count, 1) * 12).clamp(-30, 30)
    values[::7] = 1e-45
    return values.float()


GRADIENTS = {
    "plain": lambda: numbers(70_001).float(),
    "bf16": lambda: numbers(3001).bfloat16(),
    "fp16": lambda: numbers(3001).half(),
    "fp64": lambda: numbers(3001) * 1e200,
    "mixed": mixed,
    "small": lambda: torch.full((3001,), 1e-45),
    "zeros": lambda: torch.zeros(99),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(-7.0, INF, -INF), b.nan_to_num(-7.0, INF, -INF))


def in_float64(values: torch.Tensor) -> float:
    """Compute the norm with Python's exact sum."""
    return math.hypot(*values.double().tolist()) if values.numel() < 10_000 else float(values.double().norm())


def cut(values: torch.Tensor, bounds: list[int]) -> list[torch.Tensor]:
    edges = [0, *sorted(min(bound, values.numel()) for bound in bounds), values.numel()]
    return [values[start:stop] for start, stop in pairwise(edges)]


@pytest.mark.parametrize("which", sorted(GRADIENTS))
@pytest.mark.parametrize("norm", [plain_norm, reproducible_norm])
def test_the_norm_is_that_of_float64(norm, which):
    values = GRADIENTS[which]()
    found = norm([values], reduce=False)
    assert found.dtype == torch.float64
    assert found.shape == ()
    if norm is plain_norm and which in ("fp64", "mixed", "small"):
        return  # float32 squares overflow or underflow, as torch's do
    assert float(found) == pytest.approx(in_float64(values), rel=1e-12 if norm is reproducible_norm else 1e-6, abs=0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5001)), st.randoms(use_true_random=False), st.sampled_from([1, 7, 300, 2**15]))
def test_bits_do_not_depend_on_tensors_order_or_blocks(bounds, shuffle, block):
    values = mixed()
    pieces = cut(values, bounds)
    shuffle.shuffle(pieces)
    whole = reproducible_norm([values], reduce=False)
    before = norms.IN_CACHE
    try:
        norms.IN_CACHE = max(block, 100)
        assert same(reproducible_norm(pieces, reduce=False), whole)
    finally:
        norms.IN_CACHE = before


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_any_float32_numbers_have_the_norm_of_an_exact_sum(values):
    found = float(reproducible_norm([torch.tensor(values)], reduce=False))
    assert found == pytest.approx(math.hypot(*values), rel=1e-12, abs=0)


def test_layouts_with_gaps_and_permuted_ones_count_every_element_once():
    grid = numbers(12).float().view(3, 4)
    strange = [grid[:, ::2], grid[:, 1::2].t(), torch.empty(2, 0)]
    permuted = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last).copy_(numbers(120).view(2, 3, 4, 5))
    for norm in (reproducible_norm, plain_norm):
        assert float(norm(strange, reduce=False)) == pytest.approx(in_float64(grid.flatten()), rel=1e-6)
        assert float(norm([permuted], reduce=False)) == pytest.approx(in_float64(permuted.flatten()), rel=1e-6)
    assert same(reproducible_norm(strange, reduce=False), reproducible_norm([grid], reduce=False))


def test_a_norm_beyond_float64_is_infinite_and_far_below_it_zero():
    huge, tiny = torch.full((4,), 1e308, dtype=torch.float64), torch.full((4,), 5e-324, dtype=torch.float64)
    assert float(reproducible_norm([huge], reduce=False)) == INF
    assert float(reproducible_norm([huge[:1]], reduce=False)) == 1e308
    assert float(reproducible_norm([tiny], reduce=False)) == 0.0
    assert float(reproducible_norm([tiny * 0 + 1e-300], reduce=False)) == pytest.approx(2e-300, rel=1e-12, abs=0)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("max_norm", [0.5, 1e9, 0.0])
def test_clipping_scales_as_torch_does(dtype, max_norm):
    ours = [numbers(300).to(DTYPES[dtype]), numbers(7, 1).to(DTYPES[dtype])]
    theirs = [torch.nn.Parameter(torch.zeros_like(each)) for each in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    before = [each.clone() for each in ours]
    clip_by(ours, reproducible_norm(ours, reduce=False), max_norm)
    for gradient, parameter, original in zip(ours, theirs, before, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-2 if dtype == "bfloat16" else 1e-6, atol=0)
        assert torch.equal(gradient, original) is (max_norm == 1e9)


@pytest.mark.parametrize(("value", "wanted"), [(INF, [0.0, NAN]), (NAN, [NAN, NAN])])
def test_clipping_by_what_is_not_finite_does_as_torch_does(value, wanted):
    gradient = torch.tensor([1.0, value])
    clip_by([gradient], reproducible_norm([gradient], reduce=False), 1.0)
    assert same(gradient, torch.tensor(wanted))


def shards(values: torch.Tensor, world: World) -> dict[str, list[torch.Tensor]]:
    """Distribute elements to ranks in several ways; return this rank's part of each."""
    of_size = values.numel() // world.size + 1
    block = values[world.rank * of_size : (world.rank + 1) * of_size]
    return {
        "flat shards": [block],
        "flat shards in tensors": cut(block, [3, 3, 1000]),
        "every so many": [values[world.rank :: world.size]],
        "one rank has all": [values] if world.rank == world.size - 1 else [],
        "one rank has all, the others empty shards": [values if world.rank == 0 else values[:0]],
        "reversed": cut(values.flip(0), [10, 50, 60][: world.size - 1])[world.rank : world.rank + 1],
    }


def wrong_norms(world: World) -> list[str]:
    wrong = []
    for which, build in GRADIENTS.items():
        values = build()[:4000] if which != "plain" else build()
        one_process = reproducible_norm([values], reduce=False)
        for how, mine in shards(values, world).items():
            if not same(found := reproducible_norm(mine, world.group, reduce=True), one_process):
                wrong.append(f"{which} in {how}: {float(found)!r}, one process {float(one_process)!r}")
            near = float(plain_norm(mine, world.group, reduce=True))
            if which in ("plain", "bf16", "fp16", "zeros") and near != pytest.approx(float(one_process), rel=1e-6):
                wrong.append(f"{which} in {how}: plain norm {near!r}, one process {float(one_process)!r}")
    for where in range(world.size):
        for value in (INF, -INF, NAN):
            mine = torch.tensor([1.0, value if world.rank == where else 2.0])
            wanted = torch.tensor(abs(value), dtype=torch.float64)
            for norm in (reproducible_norm, plain_norm):
                if not same(norm([mine], world.group, reduce=True), wanted):
                    wrong.append(f"{norm.__name__} of {value} on rank {where}")
    both = torch.tensor([INF if world.rank == 0 else NAN])
    if world.size > 1 and not reproducible_norm([both], world.group, reduce=True).isnan():
        wrong.append("inf on rank 0, nan elsewhere")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_get_the_bits_of_one_process_however_elements_are_dealt(on_ranks, world_size):
    assert on_ranks(world_size, wrong_norms) == [[]] * world_size


def in_a_sub_group(world: World) -> bool:
    group = dist.new_group([0, 2])
    if world.rank == 1:
        return True
    values = mixed()
    return same(
        reproducible_norm(
            shards(values, World(world.rank // 2, 2, group, world.device))["flat shards"], group, reduce=True
        ),
        reproducible_norm([values], reduce=False),
    )


@pytest.mark.ranks
def test_a_sub_group_has_a_norm_of_its_own(on_ranks):
    assert on_ranks(3, in_a_sub_group) == [True] * 3


def test_a_sum_in_float64_would_show_the_order():
    values = mixed()
    assert len({float(each.double().square().sum()) for each in (values, values.flip(0), values.roll(1234))}) > 1
    assert len({float(reproducible_norm([each], reduce=False)) for each in (values, values.flip(0))}) == 1
