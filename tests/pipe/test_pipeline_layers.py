"""Difficult layers in a pipeline: they write buffers they read, work in place, share weights, or lack gradients.

Each is compared with a loop in one process, bit for bit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from muster.jobs.world.world import World
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.actions import Schedule
from muster.pipe.schedules.tables import schedule
from support.data_parallel import distance, same_bits

pytestmark = pytest.mark.ranks

TOKENS, WIDTH, CLASSES = 7, 4, 7
RECOMPUTED = {"recompute": True}
WAYS: list[dict[str, bool]] = [{}, RECOMPUTED]


class Smoothed(nn.Module):
    """Divides by a mean over its forwards so far. It reads the buffer that it replaces or writes in place."""

    def __init__(self, *, anew: bool) -> None:
        super().__init__()
        self.anew = anew
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
            if self.anew:
                self.mean = mean
            else:
                self.mean.copy_(mean)
        return x / self.mean.clone()  # a copy, because autograd keeps it until the backward


class Overwriting(nn.Module):
    """Writes to its input with functions, without an `inplace` attribute."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        x[:, 0] = 0.0
        return x


def embedding(**settings: Any) -> list[nn.Module]:
    return [nn.Embedding(TOKENS, WIDTH, **settings)]


def tied(uses: int = 2, **settings: Any) -> nn.Sequential:
    """The head shares the embedding's weight; with three uses, so does a layer in between."""
    layers = nn.Sequential(
        *embedding(**settings),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, CLASSES, bias=False),
        nn.Linear(CLASSES, WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, CLASSES, bias=False),
    )
    layers[5].weight = layers[0].weight
    if uses == 3:
        layers[2].weight = layers[0].weight
    return layers


def sharing() -> nn.Sequential:
    """Two layers of one stage share a buffer."""
    layers = nn.Sequential(
        *embedding(), Smoothed(anew=False), Smoothed(anew=False), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    )
    layers[2].mean = layers[1].mean
    return layers


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "spectral norm": lambda: nn.Sequential(
        *embedding(), spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), spectral_norm(nn.Linear(WIDTH, CLASSES))
    ),
    "smoothed": lambda: nn.Sequential(
        *embedding(), Smoothed(anew=True), nn.Linear(WIDTH, WIDTH), Smoothed(anew=False), nn.Linear(WIDTH, CLASSES)
    ),
    "one buffer": sharing,
    "batch norm": lambda: nn.Sequential(
        *embedding(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
    ),
    "nothing at the turn": lambda: nn.Sequential(
        *embedding(), nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, CLASSES)
    ),
    "in place at the cut": lambda: nn.Sequential(
        *embedding(), nn.Linear(WIDTH, WIDTH), Overwriting(), Overwriting(), nn.Linear(WIDTH, CLASSES)
    ),
    "in place behind a view": lambda: nn.Sequential(
        *embedding(), nn.Linear(WIDTH, WIDTH), nn.Flatten(), Overwriting(), nn.Linear(WIDTH, CLASSES)
    ),
    "sparse": lambda: nn.Sequential(
        *embedding(sparse=True), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    ),
    "tied": tied,
    "sparse and tied": lambda: tied(sparse=True),
    "tied thrice": lambda: tied(3),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(TOKENS, (9,), generator=generator), torch.randint(CLASSES, (9,), generator=generator)


def table_of(name: str, ranks: int) -> Schedule:
    """Make a schedule; a late one defers the weight gradients of each rank's first stage to the end of the step."""
    table = schedule(name.removesuffix(" late"), ranks, 4)
    if not name.endswith(" late"):
        return table
    rows = [
        tuple(sorted(row, key=lambda action, first=rank: action.kind == "W" and action.stage == first))
        for rank, row in enumerate(table.actions)
    ]
    return replace(table, actions=tuple(rows))


def wrong_steps(name: str, table: str, ranks: int, settings: dict[str, Any], *, within: float = 0.0) -> list[str]:
    """Run two steps whose gradients add up, and a third one after zero_grad, and compare with a loop."""
    torch.manual_seed(1)
    reference = MODELS[name]()
    torch.manual_seed(1)
    pipeline = Pipeline(MODELS[name](), table_of(table, ranks), loss=functional.cross_entropy, **settings)
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    problems = []
    for step in range(3):
        if step == 2:
            for module in (reference, pipeline.module):
                module.zero_grad(set_to_none="sparse" in name)
        inputs, targets = batch(step)
        kept = inputs.clone()
        pipeline.step(inputs, targets)
        for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
            (functional.cross_entropy(reference(x), y) * (len(x) / len(inputs))).backward()
        problems += [] if torch.equal(inputs, kept) else [f"step {step}: the batch was overwritten"]
        for own, parameter in pipeline.module.named_parameters():
            found, right = whole(parameter.grad), whole(wanted[own].grad)
            if not same_bits(found, right) and not (within and distance(found, right) < within):
                problems.append(f"step {step}: gradient of {own} is off by {distance(found, right):.1e}")
    state = reference.state_dict()
    problems += [key for key, each in pipeline.module.state_dict().items() if not same_bits(each, state[key])]
    return [f"{name}, {table}, {settings}: {each}" for each in problems]


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient


CASES = [
    *((name, "1f1b", RECOMPUTED) for name in ("spectral norm", "smoothed", "one buffer", "batch norm")),
    *((f"in place {where}", "1f1b", way) for where in ("at the cut", "behind a view") for way in WAYS),
    ("spectral norm", "zbv", RECOMPUTED),
    ("nothing at the turn", "zbv late", {}),
    ("in place at the cut", "zb1p", RECOMPUTED),
    *((name, table, {}) for name in ("sparse", "tied", "sparse and tied") for table in ("1f1b", "zbv")),
    ("tied", "interleaved", RECOMPUTED),
    ("tied", "zb1p", RECOMPUTED),
    ("tied thrice", "zbv", {}),
]


def wrong_layers(world: World) -> list[str]:
    problems = []
    for name, table, way in CASES:
        problems += wrong_steps(name, table, world.size, {**way, "exact": True})
    for name, table in (("tied", "1f1b"), ("sparse and tied", "zbv")):
        problems += wrong_steps(name, table, world.size, {}, within=1e-6)
    return problems


def test_layers_that_write_overwrite_and_share_are_those_of_a_loop(on_ranks):
    assert on_ranks(2, wrong_layers) == [[]] * 2


@pytest.mark.parametrize("way", WAYS, ids=["whole", "recompute"])
def test_weights_that_stages_of_one_rank_share_have_a_loops_bits_where_exact(way: dict[str, bool]):
    table = schedule("interleaved", 1, 4, chunks=3)
    torch.manual_seed(1)
    reference = tied(3)
    torch.manual_seed(1)
    pipeline = Pipeline(tied(3), table, loss=functional.cross_entropy, exact=True, **way)
    inputs, targets = batch(0)
    pipeline.step(inputs, targets)
    for x, y in zip(inputs.tensor_split(4), targets.tensor_split(4), strict=True):
        (functional.cross_entropy(reference(x), y) * (len(x) / len(inputs))).backward()
    for (name, found), wanted in zip(pipeline.module.named_parameters(), reference.parameters(), strict=True):
        assert same_bits(found.grad, wanted.grad), name


class Sometimes(nn.Module):
    """Writes a buffer only in its second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 2:
            self.seen += 1.0
        return x + self.seen


def test_a_buffer_that_a_second_forward_would_not_find_as_it_was_is_refused():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Sometimes()), nn.Linear(2, 2))
    pipeline = Pipeline(layers, schedule("gpipe", 1, 4), loss=functional.mse_loss, recompute=True)
    with pytest.raises(RuntimeError, match=r"layer '1\.0' has written its buffer 'seen', unlike in its first"):
        pipeline.step(torch.ones(8, 2), torch.ones(8, 2))


class Pair(nn.Module):
    """Turns one tensor into two, and two into one."""

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        return (x, x * 2.0) if isinstance(x, Tensor) else x[0] + x[1]


def test_tensors_may_go_in_pairs_within_a_stage():
    layers = nn.Sequential(nn.Linear(2, 2), Pair(), Pair(), nn.Linear(2, 2))
    table, x, y = schedule("1f1b", 1, 1), torch.ones(2, 2), torch.ones(2, 2)
    found = Pipeline(layers, table, loss=functional.mse_loss, recompute=True).step(x, y)
    assert same_bits(found, functional.mse_loss(layers(x), y).detach().double())
