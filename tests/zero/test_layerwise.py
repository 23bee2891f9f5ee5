"""Layerwise, the simplest form of stage 3, trains like one process, and every rank holds only its slices."""

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from muster.ddp import BucketedDDP
from muster.jobs.models.shapes import GptShape
from muster.jobs.train.models.gpt import build_gpt
from muster.jobs.world.world import World
from muster.zero import layerwise
from muster.zero.flat import ALIGNMENT
from muster.zero.layerwise import Layerwise
from support.tensors import apart

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

STEPS = 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda build: build(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda build: build(torch.optim.AdamW, lr=1e-2),
}


class Forgetful(nn.Linear):
    """Has an unused parameter and a frozen one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(outputs), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.frozen


def images() -> nn.Sequential:
    """Batch norm, in-place layers, layers without parameters, odd sizes."""
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(45, 7), nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.3)), Forgetful(7, 4), nn.Linear(4, 10),
    )  # fmt: skip


def tokens() -> nn.Sequential:
    return build_gpt(
        GptShape("own", d_model=6, d_ff=14, layers=2, heads=2, context=5, vocabulary=11, tied=False, dropout=0.2), 1
    )


def frozen_below() -> nn.Sequential:
    """The first layers are frozen, so they have no graph."""
    model = images()
    for layer in model[:2]:
        layer.requires_grad_(False)
    return model


MODELS = {"images": images, "tokens": tokens, "frozen below": frozen_below}


def built(which: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return MODELS[which]().double()


def batch(which: str, step: int, shard: int) -> tuple[Tensor, Tensor]:
    """Draw a shard's batch, and seed the random numbers of its dropout."""
    torch.manual_seed(1000 * step + shard)
    if which == "tokens":
        return torch.randint(11, (3, 5)), torch.randint(11, (3, 5))
    return torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.randint(10, (4,))


def head_loss(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(head(x).flatten(0, -2), targets.flatten())


def one_process(which: str, how: str, shards: int, own: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Train on all shards, each with its own buffers; return one shard's model, and the last gradients."""
    models = [built(which, 1) for _ in range(shards)]
    optimizer = OPTIMIZERS[how](lambda kind, **options: kind(models[0].parameters(), **options))
    for step in range(STEPS):
        optimizer.zero_grad()
        for shard, model in enumerate(models):
            model.zero_grad()
            inputs, targets = batch(which, step, shard)
            head_loss(nn.Identity(), model(inputs), targets).backward()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            if parameters[0].requires_grad:
                of_all = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
                parameters[0].grad = torch.stack(of_all).mean(0)
        optimizer.step()
        for model in models[1:]:
            for parameter, stepped in zip(model.parameters(), models[0].parameters(), strict=True):
                parameter.data.copy_(stepped)
    gradients = {name: each.grad for name, each in models[0].named_parameters() if each.grad is not None}
    return models[own], gradients


class Watch:
    """Counts how many layers are whole at a time, and how many calls compute gradients."""

    def __init__(self, model: Layerwise) -> None:
        self.model = model
        self.most = 0
        self.calls = 0
        model.on_wait = self.looks
        self.grad = torch.autograd.grad

    def looks(self, waits: bool) -> None:
        whole = [
            layer
            for layer in self.model.layers
            if any(bytes_of(flat_parameter.full) for flat_parameter in layer.flat_parameters)
        ]
        self.most = max(self.most, len(whole))

    def counted(self, *given: object, **keywords: object) -> object:
        self.calls += 1
        return self.grad(*given, **keywords)


def bytes_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def not_sliced(model: Layerwise, optimizer: torch.optim.Optimizer) -> list[str]:
    """Describe what this rank wrongly holds between steps."""
    problems = []
    for flat_parameter in model.flat_parameters:
        size, name = flat_parameter.layout.length // model.ranks, flat_parameter.names[0]
        padding = flat_parameter.layout.length - elements_of(flat_parameter)
        if padding > (len(flat_parameter.names) + model.ranks) * ALIGNMENT // flat_parameter.dtype.itemsize:
            problems.append(f"{name}: {padding} elements that nobody needs")
        if (
            flat_parameter.shard.numel() != size
            or bytes_of(flat_parameter.shard) != size * flat_parameter.shard.itemsize
        ):
            problems.append(
                f"{name}: a slice of {flat_parameter.shard.numel()} elements, wanted {size}, in "
                f"{bytes_of(flat_parameter.shard)} bytes"
            )
        if bytes_of(flat_parameter.full):
            problems.append(f"{name}: whole parameters of {bytes_of(flat_parameter.full)} bytes between steps")
        if flat_parameter.trains and (
            flat_parameter.grad is None or bytes_of(flat_parameter.grad) != size * flat_parameter.grad.itemsize
        ):
            problems.append(f"{name}: gradients of another size than a slice")
    keys = 1 if isinstance(optimizer.inner, torch.optim.SGD) else 2
    stepped = sum(flat_parameter.shard.numel() for flat_parameter in model.flat_parameters if flat_parameter.trains)
    kept = sum(each.numel() for state in optimizer.inner.state.values() for each in state.values() if each.dim())
    if kept > keys * stepped:
        problems.append(f"optimizer state of {kept} elements, for slices of {stepped}")
    held = torch.tensor(sum(each.stop - each.start for each in optimizer.held_state() if each.shape))
    dist.all_reduce(held, group=model.process_group)
    whole = sum(elements_of(flat_parameter) for flat_parameter in model.flat_parameters if flat_parameter.trains)
    if held != keys * whole:
        problems.append(f"optimizer state of {held} elements over all ranks, wanted {keys} x {whole}")
    return problems


def elements_of(flat_parameter) -> int:
    return sum(each.numel() for each in flat_parameter.parameters)


def wrong(world: World, which: str, how: str, mutant: str = "") -> list[str]:
    """Train with Layerwise; describe what differs from one process, and what a rank wrongly holds."""
    problems = []
    with ExitStack() as stack:
        if mutant:
            stack.enter_context(MUTANTS[mutant]())
        model = Layerwise(built(which, world.rank + 1), world.group, loss=head_loss)
        optimizer = OPTIMIZERS[how](model.optimizer)
        watch = Watch(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, targets = batch(which, step, world.rank)
            loss = model(inputs, targets)
            with mock.patch.object(torch.autograd, "grad", watch.counted):
                model.backward(loss)
            optimizer.step()
        problems += not_sliced(model, optimizer)
        if watch.most != 1:
            problems.append(f"{watch.most} layers were whole at a time")
        learning = len(model.layers) - (5 if which == "frozen below" else 0)
        if watch.calls != STEPS * (1 + learning):
            problems.append(f"{watch.calls} calls of autograd.grad, wanted {STEPS} x (1 + {learning} layers)")
        reference, gradients = one_process(which, how, world.size, world.rank)
        problems += apart(model.full_gradients(), gradients)
        problems += apart(dict(model.state_dict()), dict(reference.state_dict()))
        with model.gather_full() as whole:
            inputs, _ = batch(which, 9, 0)
            if not torch.allclose(whole.eval()(inputs), reference.eval()(inputs), rtol=1e-10):
                problems.append("evaluates to something else")
    return problems


def all_wrong(world: World, runs: list[list[str]]) -> list[str]:
    return [f"{which} by {how}: {each}" for which, how in runs for each in wrong(world, which, how)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_is_that_of_one_process_and_a_rank_holds_slices_only(on_ranks, world_size):
    runs = [("images", "sgd"), ("tokens", "adamw"), ("frozen below", "adamw")]
    assert on_ranks(world_size, all_wrong, runs=runs) == [[]] * world_size


def gradients_of_ddp(world: World) -> list[str]:
    problems = []
    for which in ("images", "tokens"):
        inputs, targets = batch(which, 0, world.rank)
        seed = torch.get_rng_state()
        model = Layerwise(built(which, 1), world.group)
        torch.set_rng_state(seed)
        output = model(inputs)  # without `loss`, any loss may be computed from the output
        model.backward(head_loss(nn.Identity(), output, targets))
        other = BucketedDDP(built(which, 1), world.group, find_unused_parameters=True)
        torch.set_rng_state(seed)
        head_loss(nn.Identity(), other(inputs), targets).backward()
        wanted = {name: each.grad for name, each in other.trainable() if each.grad is not None}
        found = {name: each for name, each in model.full_gradients().items() if name in wanted}
        problems += apart(found, wanted)
    return problems


def test_gradients_are_those_of_ddp(on_ranks):
    assert on_ranks(3, gradients_of_ddp) == [[]] * 3


def _mutant_of_slices(take: Callable[[Tensor, int, int, int], Tensor]) -> Callable[..., Tensor]:
    def get_local_grad_shard(self: Layerwise, flat_parameter, gradients) -> Tensor:
        flat = torch.zeros(flat_parameter.layout.length, dtype=flat_parameter.dtype)
        for view, gradient in zip(flat_parameter.views_of(flat), gradients, strict=True):
            view.copy_(gradient)
        flat /= self.ranks
        dist.all_reduce(flat, group=self.process_group)
        return take(flat, flat_parameter.begin, flat_parameter.end, flat_parameter.rank)

    return get_local_grad_shard


def _with_slices(take: Callable[[Tensor, int, int, int], Tensor]) -> Callable[[], object]:
    return lambda: mock.patch.object(Layerwise, "get_local_grad_shard", _mutant_of_slices(take))


MUTANTS: dict[str, Callable[[], object]] = {
    "": ExitStack,
    "nothing is reduced": lambda: mock.patch.object(layerwise.dist, "all_reduce", return_value=None),
    "whole gradients are kept": _with_slices(lambda flat, begin, end, rank: flat[begin:end]),
    "slices of rank 0": _with_slices(lambda flat, begin, end, rank: flat[: end - begin].clone()),
    "parameters stay whole": lambda: mock.patch.object(Layerwise, "free", return_value=None),
    "summed, not averaged": _with_slices(lambda flat, begin, end, rank: flat[begin:end] * 2),
}


def killed(world: World) -> dict[str, bool]:
    found = {}
    for mutant in MUTANTS:
        try:
            found[mutant] = bool(wrong(world, "images", "sgd", mutant))
        except (AssertionError, RuntimeError):
            found[mutant] = True
    return found


def test_mutants_are_found(on_ranks):
    wanted = {mutant: bool(mutant) for mutant in MUTANTS}
    assert on_ranks(2, killed) == [wanted] * 2
