"""Further features of a pipeline: tied weights, memory, hooks, spans, subgroups, frozen layers."""

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from muster.jobs.world.world import World
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.programs import Receive, Send
from muster.pipe.schedules.tables import schedule
from support.data_parallel import same_bits
from support.pipelines import MODELS, Case, Loop, batch_of, built, loss_of, seed_of

pytestmark = pytest.mark.ranks


def alive(world: World, name: str) -> list[str]:
    """Build a pipeline and run a step; name the other ranks' layers that are still alive on this rank."""
    layers = MODELS["gpt"]()
    each = {layer: weakref.ref(module) for layer, module in layers.named_children()}
    table = schedule(name, world.size, 4, chunks=2)
    pipeline = Pipeline(layers, table, loss=loss_of, process_group=world.group)
    del layers
    pipeline.step(*batch_of("gpt", 7, 0, world.device))
    gc.collect()
    own = [layer for layer, _ in pipeline.module.named_children()]
    assert 0 < len(own) < len(each)
    return [layer for layer, module in each.items() if module() is not None and layer not in own]


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_rank_lets_the_layers_of_others_go(on_ranks, name):
    assert on_ranks(2, alive, name=name) == [[]] * 2


def tied(world: World) -> list[str]:
    """Gradients of each use must be summed over micro-batches, then over uses: bit for bit on both ranks."""
    case = Case("gpt tied", "1f1b", 4)
    pipeline, loop = built(world, case), Loop("gpt tied", 4, world.device)
    head = loop.module[-1]
    head.weight = nn.Parameter(head.weight.detach().clone())  # separate weights, each with the gradient of one use
    name = "embed.token.weight" if world.rank == 0 else "head.weight"
    problems = [] if pipeline.tied == ({} if world.rank == 0 else {name: "embed.token.weight"}) else ["names"]
    mine = dict(pipeline.module.named_parameters())[name]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (pipeline.module, loop.module)]
    for step in range(3):
        batch = batch_of("gpt", 7, step, world.device)
        for each in optimizers:
            each.zero_grad()
        pipeline.hooks.seeds = seed_of(step)
        pipeline.step(*batch)
        loop.step(*batch, seed_of(step))
        first = loop.module[0].token.weight
        total = first.grad + head.weight.grad
        first.grad, head.weight.grad = total, total.clone()
        if mine.grad is None or not same_bits(mine.grad, total):
            problems.append(f"step {step}: gradient of {name}")
        for each in optimizers:
            each.step()
        if not same_bits(mine, first) or not same_bits(head.weight, first):
            problems.append(f"step {step}: {name}")
    return problems


def test_a_weight_of_two_ranks_gets_the_sum_and_stays_the_same_on_both(on_ranks):
    assert on_ranks(2, tied) == [[]] * 2


class Graph(torch.autograd.Function):
    """Saves its input, and a marker with the lifetime of the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: list[StorageWeakRef]) -> Tensor:
        mark = torch.empty(1)
        ctx.save_for_backward(mark)
        marks.append(StorageWeakRef(mark.untyped_storage()))
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        return gradient * 2.0, None


class Watched(nn.Linear):
    """Counts live graphs and outputs at the start of each forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.graphs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []
        self.most = [0, 0]

    def forward(self, x: Tensor) -> Tensor:
        for place, marks in enumerate((self.graphs, self.outputs)):
            self.most[place] = max(self.most[place], 1 + sum(not each.expired() for each in marks))
        output = x + Graph.apply(super().forward(x), self.graphs)  # a sum: autograd does not save it
        self.outputs.append(StorageWeakRef(output.untyped_storage()))
        return output


def held(world: World) -> dict[str, list[int]]:
    """Return for each setting the largest numbers of graphs, outputs and buffers held at once."""
    found = {}
    ways: list[tuple[str, dict[str, bool]]] = [
        ("1f1b", {}), ("gpipe", {}), ("model", {}), ("zb1p", {}), ("1f1b", {"recompute": True})
    ]  # fmt: skip
    for name, settings in ways:
        layers = nn.Sequential(*(Watched() for _ in range(4)))
        pipeline = Pipeline(layers, schedule(name, 4, 8), loss=loss_of, **settings)
        for _ in range(2):
            pipeline.step(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))
        (layer,) = pipeline.stages[world.rank].layers
        assert pipeline._channels is not None
        found[" ".join([name, *settings])] = [*layer.most, len(pipeline._channels._buffers)]  # type: ignore[misc]
    return found


def test_a_stage_holds_what_its_schedule_has_in_flight(on_ranks):
    answers = on_ranks(4, held)
    for rank, found in enumerate(answers):
        inner = [int(rank > 0), int(rank < 3)]  # receives activations, gradients
        flights = {"1f1b": 4 - rank, "gpipe": 8, "model": 1, "zb1p": 4, "1f1b recompute": 1}
        for name, in_flight in flights.items():
            graphs, outputs, buffers = found[name]
            # A recomputed graph exists only in its backward; the last stage's is not recomputed.
            assert graphs <= in_flight if name != "gpipe" else graphs == 8, (name, rank, graphs)
            # One is being made, one is being sent; the last stage's outputs belong to its graph.
            assert outputs <= 2 or rank == 3, (name, rank, outputs)
            inputs = 4 - rank if name == "1f1b recompute" else in_flight
            # Inputs in flight and one ahead; a gradient and one ahead. zb1p keeps gradients until W, and posts some
            # receives early.
            late = name == "zb1p"
            assert buffers <= inner[0] * (inputs + 1 + late) + inner[1] * (2 + late * in_flight), (name, rank, buffers)


def told(world: World) -> list[Any]:
    """Return what hooks and spans reported for a step."""
    ended: list[Any] = []
    table = schedule("interleaved", 2, 3)
    pipeline = Pipeline(MODELS["gpt"](), table, loss=loss_of)
    pipeline.on_last_backward = lambda stage: ended.append(
        [stage, all(each.grad is not None for each in pipeline.stages[stage].learning)]
    )
    forwards: list[tuple[int, int]] = []
    pipeline.hooks.on_forward = lambda stage, microbatch: forwards.append((stage, microbatch))
    batch = batch_of("gpt", 6, 0, world.device)
    pipeline.step(*batch)
    steps = [each.step for each in pipeline.spans]
    actions = tuple(each for each in steps if isinstance(each, Action))
    ordered = all(a.start_s <= a.end_s <= b.start_s <= b.end_s for a, b in pairwise(pipeline.spans))
    asked = [(each.stage, each.microbatch) for each in actions if each.kind == "F"]
    sent = sum(isinstance(each, Send) for each in steps)
    received = sum(isinstance(each, Receive) for each in steps)
    return [sorted(ended), actions == table.actions[world.rank], ordered, asked == forwards, sent, received]


def test_hooks_and_spans_tell_what_a_rank_did(on_ranks):
    first, second = on_ranks(2, told)
    assert first == [[[0, True], [2, True]], True, True, True, 9, 9]
    assert second == [[[1, True], [3, True]], True, True, True, 9, 9]


def in_subgroups(world: World) -> float:
    """Run two independent pipelines, each on its own ranks."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pipeline = Pipeline(
        MODELS["vgg"](), schedule("1f1b", 2, 4), loss=loss_of, process_group=groups[world.rank // 2], recompute=True
    )
    losses = [float(pipeline.step(*batch_of("vgg", 5, world.rank // 2, world.device))) for _ in range(2)]
    assert losses[0] == losses[1]  # batch norms update running statistics, but do not use them
    return losses[0]


def test_pipelines_of_subgroups_do_not_hear_each_other(on_ranks):
    losses = on_ranks(4, in_subgroups)
    assert losses[0] == losses[1] != losses[2] == losses[3]


def frozen(world: World) -> list[str]:
    """Frozen layers get no gradients; trainable ones get theirs."""
    layers = MODELS["odd"]()
    for layer in layers[:6]:
        layer.requires_grad_(False)
    pipeline = Pipeline(layers, schedule("gpipe", 3, 2), loss=loss_of, cuts=(0, 4, 7))
    pipeline.step(*batch_of("odd", 4, 0, world.device))
    return sorted(name for name, each in pipeline.module.named_parameters() if each.grad is not None)


def test_layers_that_do_not_learn_are_sent_no_gradients(on_ranks):
    assert on_ranks(3, frozen) == [[], ["shifted.shift"], ["head.bias", "head.weight"]]


def seen(world: World) -> list[float]:
    """Make the loss a view of the received number; return it for two steps, and for one process."""
    torch.manual_seed(0)
    layers, inputs = nn.Sequential(nn.Linear(4, 1), nn.Identity()), torch.randn(6, 4)
    pipeline = Pipeline(layers, schedule("1f1b", 2, 6), loss=lambda output, _: output.squeeze())
    losses = [pipeline.step(inputs, inputs).item() for _ in range(2)]
    return [*losses, sum(layers(inputs).double()).item() / 6]


def test_a_loss_that_lies_in_a_buffer_outlives_it(on_ranks):
    """Losses used to be overwritten by those of later micro-batches."""
    for first, second, wanted in on_ranks(2, seen):
        assert (first, second) == pytest.approx((wanted, wanted), rel=1e-6)


def test_one_process_without_a_group_is_a_pipeline_too():
    loop, table = Loop("vgg", 3, torch.device("cpu")), schedule("gpipe", 1, 3)
    pipeline = Pipeline(MODELS["vgg"](), table, loss=loss_of)
    batch = batch_of("vgg", 5, 0, torch.device("cpu"))
    assert same_bits(pipeline.step(*batch), loop.step(*batch, seed_of(0)))
    assert same_bits(pipeline.evaluate(batch[0]), loop.evaluate(batch[0]))


class Added(nn.Module):
    """Adds a parameter with the shape of its input: autograd uses one tensor as the gradient of both."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.p


@pytest.mark.parametrize("recompute", [False, True], ids=["whole", "recompute"])
def test_a_weight_and_an_input_with_one_gradient_do_not_share_its_memory(recompute: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 3), Added(), Added(), nn.Linear(3, 3))
    inputs, targets = torch.randn(8, 3), torch.randn(8, 3)
    for part in range(4):
        here = slice(2 * part, 2 * part + 2)
        (nn.functional.mse_loss(layers(inputs[here]), targets[here]) * 0.25).backward()
    wanted = {name: each.grad for name, each in layers.named_parameters()}
    layers.zero_grad()
    pipeline = Pipeline(layers, schedule("1f1b", 1, 4), loss=nn.functional.mse_loss, recompute=recompute)
    pipeline.step(inputs, targets)
    for name, each in pipeline.module.named_parameters():
        assert same_bits(each.grad, wanted[name]), name


class Ended(nn.Module):
    """Returns no gradient for its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() * 2.0


@pytest.mark.parametrize("recompute", [False, True], ids=["whole", "recompute"])
def test_a_stage_behind_which_no_gradient_begins_gets_none(recompute: bool) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), Ended(), nn.Linear(3, 3))
    table = schedule("interleaved", 1, 2, chunks=2)
    pipeline = Pipeline(layers, table, loss=nn.functional.mse_loss, cuts=(0, 2), recompute=recompute)
    pipeline.step(torch.randn(4, 3), torch.randn(4, 3))
    found = {name: each.grad is None for name, each in pipeline.module.named_parameters()}
    assert found == {"0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False}
