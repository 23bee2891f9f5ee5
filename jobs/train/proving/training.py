"""The last probe of every kind: train the job's own model and data for a few steps, and compare with one process."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.jobs.basics.sections import replaced
from muster.jobs.basics.words import counted
from muster.jobs.train.data import open_data
from muster.jobs.train.data.loading import MicroInput, Steps, move, move_inputs
from muster.jobs.train.data.sampling import GlobalBatch, Plan
from muster.jobs.train.models import model_of
from muster.jobs.train.models.made import layers_of, loss_of
from muster.jobs.train.numerics import numerics_of
from muster.jobs.train.numerics.optim import recipe
from muster.jobs.train.numerics.weighing import own_mean
from muster.jobs.train.proving.bench import Bench, finish
from muster.jobs.train.proving.judging import TOLERANCE, farthest
from muster.jobs.train.proving.kinds import FULL
from muster.jobs.train.reference import Reference, Setting, state_of
from muster.jobs.train.rng.draws import seed_all
from muster.jobs.train.rng.layer_seeds import forward_seed

MICRO_BATCHES: Final = 4  # number of micro-batches in a pipeline, unless the job accumulates gradients
Found = tuple[list[float], dict[str, Tensor]]


def trains(bench: Bench) -> None:
    """Compare the losses and the final state with those of the reference, which rank 0 runs in one process."""
    setting = setting_of(bench)
    if why := unfit(bench, setting):
        bench.row("one-process", None, why)
        return
    losses, state = (by_pipeline if bench.user.kind.name == "pipeline" else by_batches)(bench, setting)
    if bench.world.rank != 0:
        return
    data = setting.data
    reference = Reference(setting)
    reference.weights = None  # the class averages means
    wanted = reference.run(move_inputs(data.train_batch(torch.tensor([0]), 0)[0], bench.device, setting.dtype))
    name, far = farthest(state, {name: wanted.state[name] for name in state})
    off = max(abs(mine / theirs - 1.0) for mine, theirs in zip(losses, wanted.losses, strict=True))
    ok = far <= TOLERANCE and off <= TOLERANCE
    said = f"{counted(setting.steps, 'step')} of {data.name}: losses differ by {off:.1e}, parameters by {far:.1e}"
    bench.row("one-process", ok, said if ok else f"{said}; farthest: {name}")


def setting_of(bench: Bench) -> Setting:
    """Return the job in float64, without mode-specific settings, clipping or a schedule."""
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
    plan = Plan(data.train_samples, size, 1 if in_pipe else bench.world.size, accumulation, settings.seed)
    return Setting(settings, data, plan, bench.steps, bench.steps, bench.device, torch.float64)


def unfit(bench: Bench, setting: Setting) -> str:
    """Return why the job's model does not fit a pipeline class, or "" if it fits or the class is of another kind."""
    if bench.user.kind.name != "pipeline":
        return ""
    model = model_of(setting.settings, vocabulary=setting.data.vocabulary)
    if len(list(model.named_parameters(remove_duplicate=False))) != len(list(model.parameters())):
        return "the job's model shares a parameter between layers; choose another model, or set train.model.tied=false"
    if any(isinstance(each, nn.modules.dropout._DropoutNd) and each.p for each in model.modules()):
        return "the job's model has dropout, whose masks depend on the order of layers; choose a model without dropout"
    return ""


class TrainingTask:
    """The job's model, and this rank's batches."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting, self.rank, self.settings = setting, rank, setting.settings
        self.model: nn.Module = numerics_of(self.settings, setting.device).place(
            model_of(self.settings, vocabulary=setting.data.vocabulary)
        )
        self._loss = loss_of(self.settings)
        self.kind, self.options = recipe(list(self.model.parameters()), self.settings.optimizer, cut_anywhere=True)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch."""
        return own_mean(self._loss(outputs, targets), targets)

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


def by_batches(bench: Bench, setting: Setting) -> Found:
    """Train with the class as the model's wrapper or as the optimizer. Every rank has its part of a batch."""
    task, losses, kind = TrainingTask(setting, bench.world.rank), [], bench.user.kind.name
    names = [name for name, _ in task.model.named_parameters()]
    call, trained = task.model, [each for each in task.model.parameters() if each.requires_grad]
    with bench.own_code(0, "construction for the job's model, before step"):
        if kind == "optimizer":
            optimizer = bench.user.build(trained, task.kind, **task.options)
        else:
            call = bench.user.build(task.model)
            optimizer = task.kind(list(call.parameters()) if kind == "sharded" else trained, **task.options)
    for step, batch, micro_batches in task.steps(setting.plan):
        with bench.own_code(step):
            total = task.backward(call, step, micro_batches)
            if kind == "optimizer":
                average(trained)
            optimizer.step()
            (optimizer if kind == "sharded" else task.model).zero_grad()
        losses.append(sum(bench.everywhere(total)) / batch.samples)
    if kind != "sharded":
        return losses, state_of(task.model)
    with bench.own_code(setting.steps, f"{FULL}(), after step"):
        state = getattr(call, FULL)()
    return losses, {name: state[name] for name in names if name in state}


def average(parameters: list[nn.Parameter]) -> None:
    """Average gradients over the ranks before the optimizer's step."""
    for each in parameters:
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()


def by_pipeline(bench: Bench, setting: Setting) -> Found:
    """Train with the pipeline class in place of the model. The job's optimizer updates each rank's layers."""
    task, losses = TrainingTask(setting, 0), []
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
