"""Split backwards with data parallelism: buckets are sent once weights have their last gradient, with the same bits."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from muster.ddp import BucketedDDP, GatherScatter
from muster.ddp.base import DataParallel
from muster.jobs.world.world import World
from muster.pipe.mesh import Mesh
from muster.pipe.pipeline import Pipeline
from muster.pipe.schedules.tables import schedule
from muster.pipe.splitting.halves import WeightQueue
from muster.zero import ShardedDataParallel
from support.data_parallel import same_bits
from support.pipelines import MODELS, Loop, batch_of, loss_of, seed_of
from support.refusals import said_by

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SMALL_MB = 0.0002
MICROBATCHES = 3
WRAPPERS = {
    "bucketed": lambda module, group: BucketedDDP(module, group, bucket_size_mb=SMALL_MB, exact=True),
    "gathered": lambda module, group: GatherScatter(module, group, exact=True),
    "zero 1": lambda module, group: ShardedDataParallel(module, group, stage=1, bucket_size_mb=SMALL_MB, exact=True),
    "zero 2": lambda module, group: ShardedDataParallel(module, group, stage=2, bucket_size_mb=SMALL_MB, exact=True),
}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizer_of(model: DataParallel) -> torch.optim.Optimizer:
    settings = {"lr": 0.1, "momentum": 0.9}
    if isinstance(model, ShardedDataParallel):
        return model.optimizer(torch.optim.SGD, **settings)
    return torch.optim.SGD(model.parameters(), **settings)


def plain_step(model: DataParallel, batches: list[torch.Tensor]) -> None:
    *first, last = batches
    with model.no_sync():
        for x in first:
            model(x).square().sum().backward()
    model(last).square().sum().backward()
    model.finish_gradient_synchronization()


def split_step(model: DataParallel, queue: WeightQueue, batches: list[torch.Tensor]) -> list[int]:
    """Return the number of buckets in progress after each parameter became ready."""
    launched: list[int] = []

    def ready(parameter: nn.Parameter) -> None:
        model.gradients_are_ready([parameter])
        reducer = getattr(model, "_reducer", None)
        launched.append(len(reducer._waits) if reducer is not None else 0)

    handles = []
    with model.no_sync():
        outputs = [model(x) for x in batches]
        for index, y in enumerate(outputs):
            with queue.collecting(index):
                y.square().sum().backward()
        split = {id(each): each for layer in queue._layers for each in layer.parameters()}
        model.gradients_are_ready([each for each in model.module.parameters() if id(each) not in split])
        for index in range(len(batches)):
            if index == len(batches) - 1:
                handles += [each.register_post_accumulate_grad_hook(ready) for each in split.values()]
            queue.run(index)
    for each in handles:
        each.remove()
    model.finish_gradient_synchronization()
    queue.finish()
    return launched


def wrong_halves(world: World) -> list[str]:
    problems = []
    for name, wrap in WRAPPERS.items():
        plain, ours = wrap(mlp(), world.group), wrap(mlp(), world.group)
        queue = WeightQueue(ours.module, exact=True)
        optimizers = [optimizer_of(each) for each in (plain, ours)]
        for step in range(2):
            torch.manual_seed(10 * step + world.rank)
            batches = [torch.randn(4, 6) for _ in range(MICROBATCHES)]
            for each in optimizers:
                each.zero_grad()
            plain_step(plain, batches)
            launched = split_step(ours, queue, batches)
            if name != "gathered" and not launched[0] < launched[-1]:
                problems.append(f"{name}: buckets on their way were {launched}")
            for each in optimizers:
                each.step()
        queue.restore()
        mine, wanted = ours.state_dict(), plain.state_dict()
        problems += [f"{name}: {key}" for key, each in wanted.items() if not same_bits(mine[key], each)]
    return problems


def test_wrappers_take_gradients_that_are_made_later(on_ranks):
    assert on_ranks(2, wrong_halves) == [[]] * 2


def said_twice(world: World) -> list[str]:
    model = BucketedDDP(mlp(), world.group)
    first = next(model.parameters())
    heard = []
    with model.no_sync():
        model(torch.randn(4, 6)).sum().backward()
        model.gradients_are_ready([first])
        for again in (lambda: model.gradients_are_ready([first]), lambda: model(torch.randn(4, 6)).sum()):
            said = said_by(again, RuntimeError)
            heard += [said] if said != "nothing was raised" else []
    model.zero_grad()
    plain_step(model, [torch.randn(4, 6)] * 2)  # the abandoned step has left nothing behind
    return heard


def test_a_gradient_that_is_ready_is_so_once(on_ranks):
    message = "0.weight: its gradient was already reported as ready in this synchronization"
    assert on_ranks(2, said_twice) == [[message]] * 2


def wrong_products(world: World) -> list[str]:
    """Compare two averaged zero-bubble pipelines of two ranks each with a loop over both batches."""
    groups = Mesh(data=2, pipe=2).groups(world.group)
    data_rank = dist.get_rank(groups.data)
    problems = []
    for wrapper, table in (("bucketed", "zb1p"), ("zero 1", "zbv"), ("zero 2", "zb1p")):
        pipeline = Pipeline(MODELS["gpt"](), schedule(table, 2, 4), loss=loss_of, process_group=groups.pipe, exact=True)
        model = WRAPPERS[wrapper](pipeline.module, groups.data)
        launched: list[int] = []

        def over(stage: int, model=model, pipeline=pipeline, launched=launched) -> None:
            model.gradients_are_ready(pipeline.stages[stage].learning)
            launched.append(len(model._reducer._waits))

        pipeline.on_last_backward = over
        optimizer = optimizer_of(model)
        loops = [Loop("gpt", 4, world.device) for _ in range(2)]
        reference = [torch.optim.SGD(each.module.parameters(), lr=0.1, momentum=0.9) for each in loops]
        for step in range(2):
            seeds = seed_of(step)
            shards = [batch_of("gpt", 6, 2 * step + each, world.device) for each in range(2)]
            optimizer.zero_grad()
            if isinstance(model, ShardedDataParallel):
                model.synchronize()
            pipeline.hooks.seeds = seeds
            with model.no_sync():
                pipeline.step(*shards[data_rank])
            model.finish_gradient_synchronization()
            optimizer.step()
            gradients = []
            for loop, shard in zip(loops, shards, strict=True):
                loop.module.zero_grad()
                loop.step(*shard, seeds)
                gradients.append([each.grad for each in loop.module.parameters()])
            for loop, each in zip(loops, reference, strict=True):
                for parameter, first, second in zip(loop.module.parameters(), *copy.copy(gradients), strict=True):
                    parameter.grad = (first + second) / 2
                each.step()
        wanted = loops[0].module.state_dict()
        mine = model.state_dict()
        problems += [f"{wrapper}, {table}: {key}" for key, each in mine.items() if not same_bits(each, wanted[key])]
        if not all(launched):
            problems.append(f"{wrapper}, {table}: nothing was on its way when a stage was over: {launched}")
    return problems


def test_zero_bubble_pipelines_and_data_parallel_train_as_one_process(on_ranks):
    assert on_ranks(4, wrong_products) == [[]] * 4


def far_from_a_loop(world: World) -> list[str]:
    """Without `exact` sums may round differently, but nothing else may differ."""
    problems = []
    for name, table, settings in (("vgg", "zb1p", {}), ("gpt", "zbv", {"recompute": True}), ("gpt tied", "zb1p", {})):
        pipeline = Pipeline(MODELS[name](), schedule(table, 2, 4), loss=loss_of, process_group=world.group, **settings)
        loop = Loop(name, 4, world.device)
        inputs, targets = batch_of(name, 7, 0, world.device)
        pipeline.hooks.seeds = seed_of(0)
        pipeline.step(inputs, targets)
        loop.step(inputs, targets, seed_of(0))
        wanted = {key: each.grad for key, each in loop.module.named_parameters(remove_duplicate=False)}
        largest = max(each.abs().max() for each in wanted.values())
        problems += [
            f"{name}, {table}: {key}"
            for key, each in pipeline.module.named_parameters()
            if each.grad is None or (each.grad - wanted[key]).abs().max() > 1e-5 * largest
        ]
    return problems


def test_zero_bubble_pipelines_that_are_not_exact_are_close_to_a_loop(on_ranks):
    assert on_ranks(2, far_from_a_loop) == [[]] * 2
