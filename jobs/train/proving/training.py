"""The last probe of every kind: train the job's own model and data for a few steps, against one process."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.basics.errors import RefusedError
from muster.jobs.basics.sections import replaced
from muster.jobs.train.data import Data, open_data
from muster.jobs.train.data.loading import MicroInput, Steps, move, move_inputs
from muster.jobs.train.data.sampling import GlobalBatch, Plan
from muster.jobs.train.models import model_of
from muster.jobs.train.models.made import layers_of, loss_of
from muster.jobs.train.numerics import numerics_of
from muster.jobs.train.numerics.optim import recipe
from muster.jobs.train.proving.bench import Bench, finish
from muster.jobs.train.proving.judging import TOLERANCE, farthest
from muster.jobs.train.proving.kinds import FULL
from muster.jobs.train.reference import Reference, Setting, state_of
from muster.jobs.train.rng.draws import seed_all
from muster.jobs.train.rng.layer_seeds import forward_seed

MICRO_BATCHES: Final = 4  # of a pipeline, unless the job accumulates
Found = tuple[list[float], dict[str, Tensor]]


def trains(bench: Bench) -> None:
    """Compare losses and the state after the last step; rank 0 alone trains the reference."""
    setting = setting_of(bench)
    losses, state = TRAINERS[bench.user.kind.name](bench, setting)
    if bench.world.rank != 0:
        return
    data = setting.data
    wanted = Reference(setting).run(move_inputs(data.train_batch(torch.tensor([0]), 0)[0], bench.device, setting.dtype))
    name, far = farthest(state, {name: each for name, each in wanted.state.items() if name in state})
    off = max(abs(mine / theirs - 1.0) for mine, theirs in zip(losses, wanted.losses, strict=True))
    ok = far <= TOLERANCE and off <= TOLERANCE
    said = f"{setting.steps} steps of {data.name}: losses within {off:.1e}, parameters within {far:.1e}"
    bench.row("one-process", ok, said if ok else f"{said}; farthest: {name}")


def setting_of(bench: Bench) -> Setting:
    """Return the job in float64, plain: without what is a mode's alone, clipping, and a schedule."""
    own = bench.settings
    plain: dict[str, Any] = dict.fromkeys(("exact", "compile", "activation_checkpointing", "cuda_graph"), False)
    plain |= dict.fromkeys(("parallel", "clip_norm", "communication_dtype"))
    schedule = replaced(own.schedule, name="constant", warmup_steps=0)
    settings = replaced(own, **plain, mode="allreduce", precision="fp64", deterministic=True, schedule=schedule)
    data = open_data(settings)
    in_pipe = bench.user.kind.name == "pipeline"
    accumulation = own.grad_accumulation if own.grad_accumulation > 1 or not in_pipe else MICRO_BATCHES
    size = min(settings.batch_size, data.train_samples)
    if in_pipe:
        size -= size % accumulation
        require_untied(settings, data)
    plan = Plan(data.train_samples, size, 1 if in_pipe else bench.world.size, accumulation, settings.seed)
    return Setting(settings, data, plan, bench.steps, bench.steps, bench.device, torch.float64)


def require_untied(settings: Any, data: Data) -> None:
    """Refuse a model that cannot be given to a pipeline class as layers.

    Raises:
        RefusedError: two layers share a parameter.
    """
    model = model_of(settings, vocabulary=data.vocabulary)
    if len(list(model.named_parameters(remove_duplicate=False))) != len(list(model.parameters())):
        raise RefusedError(
            "--with: the job's model shares a parameter between layers, which pipeline classes are not asked to "
            "support; choose another model, or set train.model.tied=false"
        )


class Task:
    """The job's model, and its batches as this rank reads them."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank, self.settings = setting, rank, setting.settings
        self.model: nn.Module = numerics_of(self.settings, setting.device).place(
            model_of(self.settings, vocabulary=setting.data.vocabulary)
        )
        self.loss = loss_of(self.settings)
        self.kind, self.options = recipe(list(self.model.parameters()), self.settings.optimizer, cut_anywhere=True)

    def steps(self, plan: Plan) -> Iterator[tuple[int, GlobalBatch, tuple[MicroInput, ...]]]:
        """Yield this rank's micro-batches of every step."""
        reader = Steps(self.setting.data, plan, [self.rank])
        for step in range(self.setting.steps):
            work = move(reader[step], self.setting.device, self.setting.dtype)
            yield step, work.batch, work.shards[0].micro_batches

    def backward(self, call: Any, step: int, micro_batches: tuple[MicroInput, ...]) -> float:
        """Run forward and backward of a step, with the class's `no_sync()` if it has one; return the sum of losses."""
        total, can_wait = 0.0, hasattr(call, "no_sync")
        for index, micro in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            seed_all(forward_seed(self.settings.seed, step, self.rank, index))
            with call.no_sync() if can_wait and not is_last else nullcontext():
                loss = self.loss(call(micro.inputs), micro.targets)
                (loss * micro.weight).backward()  # type: ignore[no-untyped-call]
            if not is_last and not can_wait:
                finish(call)
            total += float(loss.detach()) * micro.samples
        finish(call)
        return total


def mean_loss_of(bench: Bench, total: float, batch: GlobalBatch) -> float:
    """Add the sums of losses of all ranks, and divide by the samples."""
    return float(sum(bench.everywhere(total))) / batch.samples


def by_wrapper(bench: Bench, setting: Setting) -> Found:
    """Train with the class around the model, and the job's optimizer."""
    task, losses = Task(setting, bench.world.rank), []
    with bench.own_code(0, "construction around the job's model, before step"):
        wrapped = bench.user.build(task.model)
    optimizer = task.kind([each for each in task.model.parameters() if each.requires_grad], **task.options)
    for step, batch, micro_batches in task.steps(setting.plan):
        with bench.own_code(step):
            total = task.backward(wrapped, step, micro_batches)
        optimizer.step()
        task.model.zero_grad(set_to_none=True)
        losses.append(mean_loss_of(bench, total, batch))
    return losses, state_of(task.model)


def by_optimizer(bench: Bench, setting: Setting) -> Found:
    """Train with gradients that are averaged here, and the class in place of the job's optimizer."""
    task, losses = Task(setting, bench.world.rank), []
    trained = [each for each in task.model.parameters() if each.requires_grad]
    with bench.own_code(0, "construction over the job's model, before step"):
        optimizer = bench.user.build(trained, task.kind, **task.options)
    for step, batch, micro_batches in task.steps(setting.plan):
        total = task.backward(task.model, step, micro_batches)
        for each in trained:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            dist.all_reduce(each.grad)
            each.grad /= bench.world.size
        with bench.own_code(step):
            optimizer.step()
        task.model.zero_grad(set_to_none=True)
        losses.append(mean_loss_of(bench, total, batch))
    return losses, state_of(task.model)


def by_shards(bench: Bench, setting: Setting) -> Found:
    """Train with the class around the model, and the job's optimizer over the shards."""
    task, losses = Task(setting, bench.world.rank), []
    names = {name for name, _ in task.model.named_parameters()}
    with bench.own_code(0, "construction around the job's model, before step"):
        sharded = bench.user.build(task.model)
    optimizer = task.kind(list(sharded.parameters()), **task.options)
    for step, batch, micro_batches in task.steps(setting.plan):
        with bench.own_code(step):
            total = task.backward(sharded, step, micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss_of(bench, total, batch))
    with bench.own_code(setting.steps, f"{FULL}(), after step"):
        state = getattr(sharded, FULL)()
    return losses, {name: each for name, each in state.items() if name in names}


def by_pipeline(bench: Bench, setting: Setting) -> Found:
    """Train with the class in place of the model, and the job's optimizer over the layers of each rank."""
    task, losses = Task(setting, 0), []
    parts = setting.plan.accumulation
    layers = nn.Sequential()
    layers._modules.update(layers_of(task.model, task.settings)._modules)  # names may have dots
    named = dict(layers.named_parameters())
    with bench.own_code(0, "construction of the job's layers, before step"):
        pipeline = bench.user.build(layers, parts)
    mine = list(pipeline.parameters())
    optimizer = task.kind(mine, **task.options) if mine else None
    for step, _, (batch,) in task.steps(replace(setting.plan, accumulation=1)):
        with bench.own_code(step):
            loss = pipeline.train_step(batch.inputs, batch.targets, task.loss)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        given = [each for each in bench.everywhere(None if loss is None else float(loss)) if each is not None]
        losses.append(given[-1] if given else float("nan"))
    ids = {id(each) for each in mine}
    own = {name: each.detach().cpu() for name, each in named.items() if id(each) in ids}
    whole = {name: each.to(bench.device) for part in bench.everywhere(own) for name, each in part.items()}
    return losses, whole


TRAINERS: Final[dict[str, Callable[[Bench, Setting], Found]]] = {
    "wrapper": by_wrapper,
    "optimizer": by_optimizer,
    "sharded": by_shards,
    "pipeline": by_pipeline,
}
