"""Split models combined with autocast, copies, data parallelism and ZeRO; and the order of their backward."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from muster.ddp import BucketedDDP
from muster.jobs.world.world import World
from muster.pipe.mesh import Mesh
from muster.pipe.splitting.halves import WeightQueue
from muster.pipe.tensor import Column, Heads, Row, parallelize
from muster.pipe.tensor.cross_entropy import SplitCrossEntropy
from muster.pipe.tensor.linear import ColumnLinear, RowLinear, side_by_side
from muster.pipe.tensor.region import Pending, Region
from muster.zero import ShardedDataParallel
from support.tensor_parallel import WITHIN, Case, batch, build, far, part_of, split, wrong_copies, wrong_gradients

pytestmark = pytest.mark.ranks


def wrong_autocast(world: World) -> list[str]:
    """Under autocast, products are computed in bfloat16; gradients are float32 and close to one process."""
    problems = []
    for sequence in (None, 1):
        case = Case(sequence=sequence)
        whole = build(case, world, torch.float32)
        made = split(copy.deepcopy(whole), case, world)
        losses = []
        for model in (whole, made.module):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(*batch(0, world.device))
            loss.backward()
            losses.append(loss.detach())
        problems += far(losses[1], losses[0], "loss", 0.05)
        largest = max(float(each.grad.abs().max()) for each in whole.parameters())
        problems += wrong_gradients(whole, made, 0.05 * largest) + wrong_copies(world, made)
        types = {each.grad.dtype for each in made.module.parameters()}
        problems += [] if types == {torch.float32} else [f"gradients are {types}"]
    return problems


def wrong_copy(world: World) -> list[str]:
    """A copy of a split model works, although its weights are no longer adjacent; names are the whole model's."""
    problems = []
    for sequence in (None, 1):
        case = Case(sequence=sequence, tied=True)
        whole = build(case, world)
        made = split(copy.deepcopy(whole), case, world)
        other = copy.deepcopy(made.module)
        for model, joined in ((made.module, True), (other, False)):
            attention = model.block1.attention
            weights = [attention.query.weight, attention.key.weight, attention.value.weight]
            problems += [] if (side_by_side(weights) is not None) is joined else ["weights are not side by side"]
            model(*batch(0, world.device)).backward()
        for (name, one), two in zip(made.module.named_parameters(), other.parameters(), strict=True):
            problems += far(two.grad, one.grad, f"{name}: gradient of a copy", 1e-14)
        problems += [] if list(made.module.state_dict()) == list(whole.state_dict()) else ["other names"]
        problems += [] if other.head.weight is other.embed.token.weight else ["no longer tied"]
    return problems


def wrong_losses(world: World) -> list[str]:
    """Loss and gradients of split logits equal those of whole ones, also with ignored targets and large logits."""
    problems = []
    start, stop = Region(world.group).share(12)
    generator = torch.Generator().manual_seed(world.size)
    for scale in (1.0, 1e4):
        logits = (scale * torch.randn(6, 12, generator=generator, dtype=torch.float64)).requires_grad_()
        targets = torch.tensor([0, 11, -100, 5, 6, -100])
        own = logits.detach()[:, start:stop].clone().requires_grad_()
        found = SplitCrossEntropy(Region(world.group), 12)(own, targets)
        wanted = functional.cross_entropy(logits, targets)
        (3.0 * found).backward()
        (3.0 * wanted).backward()
        problems += far(found.detach(), wanted.detach(), "loss", 1e-12 * scale)
        problems += far(own.grad, logits.grad[:, start:stop], "gradient of logits", 1e-14)
    # If all targets are ignored, the mean is NaN and the gradient zero, so no step is skipped by mistake.
    own = torch.ones(2, stop - start, requires_grad=True)
    loss = SplitCrossEntropy(Region(world.group), 12)(own, torch.full((2,), -100))
    loss.backward()
    problems += [] if loss.isnan() and own.grad.eq(0.0).all() else [f"all ignored: {loss}, {own.grad}"]
    return problems


def wrong_vectors(world: World) -> list[str]:
    """One sample without a batch dimension, through a pair of layers and the loss, as `nn.Linear` allows."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 12)).double()
    made = parallelize(copy.deepcopy(whole), {"0": Column(), "2": Row()}, world.group)
    x, target = torch.randn(4, dtype=torch.float64), torch.tensor(7)
    start, stop = made.region.share(12)
    functional.cross_entropy(whole(x), target).backward()
    outputs = made.module(x)
    own = outputs.detach()[start:stop].requires_grad_()
    SplitCrossEntropy(made.region, 12)(own, target).backward()
    outputs.backward(torch.cat(gathered(own.grad, world)))
    return wrong_gradients(whole, made, WITHIN)


def gathered(part: Tensor, world: World) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(world.size)]
    dist.all_gather(parts, part, group=world.group)
    return parts


class Grouped(nn.Module):
    """Attention in which two heads of queries share one head of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.pairs = 4, 2
        self.query, self.pair, self.output = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.query(x).view(*x.shape[:2], self.heads, 3).transpose(1, 2)  # (batch, heads, tokens, 3)
        keys, values = self.pair(x).view(*x.shape[:2], self.pairs, 6).transpose(1, 2).split(3, -1)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def wrong_grouped(world: World) -> list[str]:
    torch.manual_seed(0)
    whole = Grouped().double()
    plan = {"": Heads(("heads", "pairs"), columns=("query", "pair")), "output": Row()}
    made = parallelize(copy.deepcopy(whole), plan, world.group)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for model in (whole, made.module):
        model(x).square().sum().backward()
    return wrong_gradients(whole, made, WITHIN)


def wrong_later(world: World) -> list[str]:
    """A zero-bubble pipeline computes weight gradients after the backward; communication happens before."""
    problems = []
    for sequence in (None, 1):
        case = Case(sequence=sequence)
        whole = build(case, world)
        whole(*batch(0, world.device)).backward()
        made = split(build(case, world), case, world)
        queue = WeightQueue(made.module)
        layers = [each for each in made.module.modules() if isinstance(each, (ColumnLinear, RowLinear))]
        with queue.collecting(0):
            made.module(*batch(0, world.device)).backward()
        early = [each for each in layers if each.weight.grad is not None]
        with mock.patch.object(Region, "_begin", side_effect=AssertionError("sent")):
            queue.run(0)
        problems += [f"{len(early)} gradients were made in the backward"] if early or len(layers) != 7 else []
        problems += wrong_gradients(whole, made, WITHIN) + wrong_copies(world, made)
    return problems


def wrong_start(world: World) -> list[str]:
    """Tensors that are not split become rank 0's. A model on the meta device is split there."""
    model = build(Case(), world)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(world.rank)
    problems = [each for each in wrong_copies(world, split(model, Case(), world)) if "values" in each]
    empty = build(Case()).to("meta")
    made = split(empty, Case(), world)
    found = {name: (str(each.device), tuple(each.shape)) for name, each in made.module.named_parameters()}
    wanted = {name: ("meta", each.local_shape) for name, each in made.slices.items()}
    return problems + ([] if found == wanted else [f"without memory: {found}"])


CHECKS = {
    "start": wrong_start,
    "later": wrong_later,
    "autocast": wrong_autocast,
    "copy": wrong_copy,
    "losses": wrong_losses,
    "vectors": wrong_vectors,
    "grouped heads": wrong_grouped,
}


def wrong_checks(world: World) -> list[str]:
    return [f"{name}: {each}" for name, check in CHECKS.items() for each in check(world)]


def test_autocast_copies_and_losses_are_those_of_one_process(on_ranks):
    assert on_ranks(2, wrong_checks) == [[]] * 2


class Products(TorchDispatchMode):
    """Records products of one shape."""

    def __init__(self, said: list[str], shapes: dict[tuple[int, ...], str]) -> None:
        super().__init__()
        self.said, self.shapes = said, shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and tuple(found.shape) in self.shapes:
            self.said.append(self.shapes[tuple(found.shape)])
        return found


def backward_order(world: World) -> dict[str, list[str]]:
    """Return the order in which column layers begin the sum, compute dW, and wait for the sum."""
    found = {}
    for sequence, method in ((None, "begin_sum"), (1, "begin_scatter_sum")):
        case = Case(sequence=sequence, bias=False, norm="rms")
        model = split(build(case), case, world).module
        loss = model(*batch(0, world.device))
        said: list[str] = []
        made: Callable[[Region, Tensor], Pending] = getattr(Region, method)

        def begin(region: Region, x: Tensor, made: Any = made, said: list[str] = said) -> Pending:
            said.append("begin")
            wait = made(region, x)
            return lambda: said.append("wait") or wait()

        rows = 3 * 16 // world.size
        with mock.patch.object(Region, method, begin), Products(said, {(rows, 16): "dW"}):
            loss.backward()
        found[str(sequence)] = said[said.index("dW") - 1 : said.index("dW") + 2]
    return found


def test_the_gradient_of_the_input_travels_while_that_of_the_weights_is_made(on_ranks):
    assert on_ranks(2, backward_order) == [{"None": ["begin", "dW", "wait"], "1": ["begin", "dW", "wait"]}] * 2


def wrong_products(world: World) -> list[str]:
    """Two copies on two ranks each: gradients must be the mean of one process over the batches of both."""
    mesh = Mesh(data=2, tensor=2)
    groups = mesh.groups(world.group)
    data, tensor = mesh.data_rank(world.rank), mesh.tensor_rank(world.rank)
    apart = World(tensor, 2, groups.tensor, world.device)
    problems = []
    for sequence in (None, 1):
        case = Case(tied=True, sequence=sequence)
        whole = build(case, world)
        (sum(whole(*batch(each, world.device)) for each in range(2)) / 2).backward()
        made = split(build(case, world), case, apart)
        wrapped = BucketedDDP(made.module, groups.data)
        wrapped(*batch(data, world.device)).backward()
        wrapped.finish_gradient_synchronization()
        problems += wrong_gradients(whole, made, WITHIN) + wrong_copies(apart, made)
        problems += wrong_zero(case, whole, groups.data, apart, data)
    return problems


def wrong_zero(case: Case, whole: nn.Module, group: Any, apart: World, data: int) -> list[str]:
    """A step of ZeRO, in every stage, on copies of split models equals that of one process."""
    problems = []
    stepped = copy.deepcopy(whole)
    for mine, theirs in zip(stepped.parameters(), whole.parameters(), strict=True):
        mine.grad = theirs.grad
    torch.optim.SGD(stepped.parameters(), lr=0.1).step()
    for stage in (1, 2, 3):
        made = split(build(case, apart), case, apart)
        wrapped = ShardedDataParallel(made.module, group, stage=stage)
        optimizer = wrapped.optimizer(torch.optim.SGD, lr=0.1)
        wrapped(*batch(data, apart.device)).backward()
        optimizer.step()
        with wrapped.gather_full():
            for name, each in made.module.named_parameters():
                wanted = part_of(stepped.get_parameter(name).detach(), made, name)
                problems += far(each.detach(), wanted, f"zero{stage}: {name}", WITHIN)
    return problems


def test_data_parallel_and_zero_over_split_models_step_as_one_process(on_ranks):
    assert on_ranks(4, wrong_products) == [[]] * 4
