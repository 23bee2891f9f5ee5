"""What every data-parallel wrapper must do, as functions that run on a rank and return what is wrong: [] if nothing is.

Tests and mutations run the same functions. Each builds the module from another seed on every rank, so that a wrapper
that does not broadcast is wrong everywhere, and compares with one process that computes shard after shard.

Where the same bits are promised, a difference of one bit is wrong. Where only the order of a sum may differ, V numbers
added in any order and divided before or after may be off by 2 V eps m, where m is the largest element of the mean of
their magnitudes (two orders, each V roundings of at most eps times the sum of magnitudes); eps is that of what is sent.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from muster import ddp
from muster.ddp.base import DataParallel
from muster.jobs.world.world import World
from support.data_parallel_models import CASES, Case

WRAPPERS = [each for each in sorted(ddp.__all__) if issubclass(getattr(ddp, each), DataParallel)]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}
LAUNCHES = {"c10d::allreduce_", "c10d::gather_", "c10d::scatter_"}
GRADIENT = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"

State = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Means:
    """What one process gets from shards: each gradient's mean, and the largest element of the mean of magnitudes."""

    means: Gradients
    largest: dict[str, float] = field(default_factory=dict)


def wrap(world: World, wrapper: str, case: str, seed: int | None = None, **settings: Any) -> DataParallel:
    """Wrap a case's module, built from a seed of this rank's own unless one is given."""
    if name := settings.pop("communication_dtype", None):
        settings["communication_dtype"] = DTYPES[name]
    module = CASES[case].build(world.rank + 1 if seed is None else seed).to(world.device)
    if CASES[case].unused:
        settings.setdefault("find_unused_parameters", True)
    made: DataParallel = getattr(ddp, wrapper)(module, world.group, **settings)
    return made


def backwards(world: World, model: DataParallel, case: Case, shards: int = 1, offset: int = 0) -> None:
    """Compute this rank's shards: all but the last in `no_sync`; virtual shards if the wrapper is exact."""
    mine = range(offset + world.rank * shards, offset + (world.rank + 1) * shards)
    for shard in mine:
        with nullcontext() if shard == mine[-1] else model.no_sync():
            case.loss(model, shard).backward()
        if model.exact and shard != mine[-1]:
            model.next_shard()
    model.finish_gradient_synchronization()


def one_process(case: Case, module: nn.Module, shards: Iterable[int]) -> Means:
    """Add the gradients of shards in order, first to last, then divide once; the module is left without gradients."""
    total: Gradients = {}
    magnitude: dict[str, Tensor] = {}
    count = 0
    for shard in shards:
        count += 1
        module.zero_grad()
        case.loss(module, shard).backward()
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            old = total.get(name)
            new = parameter.grad
            if old is not None:
                total[name] = old + (torch.zeros_like(old) if new is None else new)
            else:
                total[name] = None if new is None else new.clone()
            if new is not None:
                magnitude[name] = magnitude.get(name, new.new_zeros(())) + new.abs().double()
    module.zero_grad()
    means = {name: sum_ if sum_ is None or count == 1 else sum_ / count for name, sum_ in total.items()}
    return Means(means, {name: float(each.max()) / count for name, each in magnitude.items() if each.numel()})


def gradients_of(module: nn.Module) -> Gradients:
    return {name: each.grad for name, each in module.named_parameters() if each.requires_grad}


def states_apart(found: State, wanted: State) -> list[str]:
    """Name the entries whose bits differ, or that only one side has."""
    if list(found) != list(wanted):
        return [f"entries {list(found)} where {list(wanted)} were wanted"]
    return [f"{name} has other bits" for name in wanted if not same_bits(found[name], wanted[name])]


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    left, right = (each.detach().contiguous().reshape(-1) for each in (found, wanted))
    return (
        found.shape == wanted.shape
        and found.dtype == wanted.dtype
        and torch.equal(
            left.view(torch.uint8) if left.numel() else left, right.view(torch.uint8) if right.numel() else right
        )
    )


def gradients_apart(found: Gradients, wanted: Means, numbers: int, sent: torch.dtype | None = None) -> list[str]:
    """Name gradients that are further apart than a sum of so many numbers explains; 0 numbers: that differ in a bit."""
    problems = []
    for name, mean in wanted.means.items():
        gradient = found.get(name)
        if gradient is None or mean is None:
            if gradient is not mean:
                problems.append(f"{name}: gradient {'missing' if gradient is None else 'where none was wanted'}")
        elif numbers == 0 or not mean.numel():
            if not same_bits(gradient, mean):
                problems.append(f"{name}: gradient has other bits, by {distance(gradient, mean):.2e}")
        elif (off := distance(gradient, mean)) > (
            bound := 2 * numbers * torch.finfo(sent or mean.dtype).eps * wanted.largest[name]
        ):
            problems.append(f"{name}: gradient is off by {off:.2e}, more than {bound:.2e}")
    return problems


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max()) if found.shape == wanted.shape else float("inf")


def numbers_added(world: World, model: DataParallel, shards: int) -> int:
    """Return how many numbers a sum of unknown order has; 0 where the bits are promised.

    Two numbers have only one order, and to halve is exact; more ranks only add in one order where that is asked for.
    """
    two = world.size <= 2 and shards == 1 and world.device.type == "cpu"  # NCCL may divide before it adds
    promised = model.exact or type(model) is ddp.GatherScatter or two
    if model.communication_dtype is not None:
        return 2 * world.size * shards + 2  # each gradient is rounded when it is sent, and the mean
    return 0 if promised else world.size * shards


def wrong_start(world: World, wrapper: str, case: str, **settings: Any) -> list[str]:
    """Every rank must start with rank 0's parameters, frozen ones too, and buffers, under the module's own names."""
    wanted = CASES[case].build(1).to(world.device).state_dict()
    return states_apart(wrap(world, wrapper, case, **settings).state_dict(), wanted)


def wrong_gradients(world: World, wrapper: str, case: str, shards: int = 1, **settings: Any) -> list[str]:
    """Gradients must be the mean over all ranks' shards, as one process has it."""
    model = wrap(world, wrapper, case, **settings)
    backwards(world, model, CASES[case], shards)
    wanted = one_process(CASES[case], CASES[case].build(1).to(world.device), range(world.size * shards))
    found = gradients_of(model.module)
    return gradients_apart(found, wanted, numbers_added(world, model, shards), model.communication_dtype)


def wrong_training(
    world: World, wrapper: str, case: str, optimizer: str, steps: int = 5, shards: int = 1, **settings: Any
) -> list[str]:
    """Steps of an optimizer must be those of one process; rank 0 compares, and all must have its parameters.

    Where bits are promised, one process trains on its own. Where not, it takes the wrapper's gradients after they have
    been found near enough: so an error is seen in the step that makes it, however it would grow.
    """
    model = wrap(world, wrapper, case, **settings)
    made = OPTIMIZERS[optimizer](model.parameters())
    serial = CASES[case].build(1).to(world.device)
    serial_made = OPTIMIZERS[optimizer](serial.parameters())
    numbers = numbers_added(world, model, shards)
    problems: list[str] = []
    for step in range(steps):
        offset = step * world.size * shards
        made.zero_grad(set_to_none=step % 2 == 0)  # both ways of forgetting gradients
        backwards(world, model, CASES[case], shards, offset)
        found = gradients_of(model.module)
        if world.rank == 0:
            shadow = copy.deepcopy(serial)  # forwards of many shards must not count in its running statistics
            wanted = one_process(CASES[case], shadow, range(offset, offset + world.size * shards))
            problems += [f"step {step}: {each}" for each in gradients_apart(found, wanted, numbers)]
            for name, parameter in serial.named_parameters():
                theirs = found.get(name) if numbers else wanted.means.get(name)
                parameter.grad = None if theirs is None else theirs.clone()
            serial_made.step()
        made.step()
    if world.rank == 0:
        problems += states_apart(dict(model.module.named_parameters()), dict(serial.named_parameters()))
    return problems + parts_from_rank_0(world, model.module)


def parts_from_rank_0(world: World, module: nn.Module) -> list[str]:
    """Name the parameters that are not rank 0's; a collective."""
    problems = []
    for name, parameter in module.named_parameters():
        theirs = parameter.detach().contiguous().clone()
        dist.broadcast(theirs, group=world.group, group_src=0)
        if not same_bits(parameter, theirs):
            problems.append(f"{name} is not rank 0's after training")
    return problems


@dataclass(frozen=True)
class Trace:
    """When collectives were launched and gradients became ready in one step, by a profiler's clock."""

    launches: list[float]
    gradients: list[tuple[float, float]]  # start and end of each

    def gradients_after(self) -> list[int]:
        """Return, of each launch in order, how many gradients autograd had not begun to accumulate."""
        return [sum(start > launch for start, _ in self.gradients) for launch in self.launches]


def traced(work: Callable[[], None]) -> Trace:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    events = recorded.events()
    assert events is not None
    return Trace(
        sorted(event.time_range.start for event in events if event.name in LAUNCHES),
        sorted((event.time_range.start, event.time_range.end) for event in events if event.name == GRADIENT),
    )


def wrong_overlap(world: World, wrapper: str, left: list[int] | None, count: int = 0, **settings: Any) -> list[str]:
    """Collectives of the chain must be as many as `left`, each launched with so many gradients still to come.

    The last is launched within the last gradient's hook. With None there must be `count`, all after the last gradient.
    """
    model = wrap(world, wrapper, "chain", **settings)
    backwards(world, model, CASES["chain"])  # the first step may ask who uses what
    model.zero_grad()
    trace = traced(lambda: backwards(world, model, CASES["chain"]))
    last_ready = max(end for _, end in trace.gradients)
    problems = []
    if left is None:
        if len(trace.launches) != count:
            problems.append(f"{len(trace.launches)} collectives, {count} wanted")
        if early := [launch for launch in trace.launches if launch < last_ready]:
            problems.append(f"{len(early)} collectives before the end of the backward")
        return problems
    if (after := trace.gradients_after()) != left:
        problems.append(f"collectives launched with {after} gradients to come, {left} wanted")
    if late := [launch for launch in trace.launches if launch > last_ready]:
        problems.append(f"{len(late)} collectives after the end of the backward")
    return problems
