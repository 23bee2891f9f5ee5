"""What `ShardedDataParallel` must do, as functions that run on a rank and return what is wrong: [] if nothing is.

Tests and mutations run the same functions. A run is compared with one process as `data_parallel.py` says: where bits
are promised, that process trains on its own; where not, it takes the wrapper's gradients once they are near enough.
"""

import copy
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster.ddp.norms import clip_by, reproducible_norm
from muster.jobs.world.world import World
from muster.zero import ShardedDataParallel, ShardedOptimizer
from support.data_parallel import DTYPES, Gradients, Means, gradients_apart, one_process, parts_from_rank_0, same_bits
from support.data_parallel_models import CASES, Case, squares
from support.zero_models import OPTIMIZERS, Ragged, Several, own_groups, ragged_loss, seeded

HALF = (torch.bfloat16, torch.float32, torch.bfloat16)
ALL_CASES = {
    **CASES,
    "ragged": Case(partial(seeded, Ragged), ragged_loss),
    "masters": Case(partial(seeded, partial(Several, HALF)), partial(squares, width=9)),
}
SMALL_MB = 1 / 1024  # a bucket or two of every module here


@contextmanager
def over_links() -> Iterator[None]:
    """Let ranks talk as ranks of several hosts do, who cannot read each other's memory."""
    with (
        mock.patch("muster.zero.gather.on_one_host", return_value=False),
        mock.patch("muster.zero.data_parallel.shared_memory_peers", return_value=None),
    ):
        yield


@dataclass(frozen=True)
class Run:
    """What is trained, and how: `clip` to a norm; `groups` of own hyper-parameters; `units` by name."""

    case: str
    how: str = "sgd"
    stage: int = 1
    steps: int = 3
    shards: int = 1
    clip: float | None = None
    groups: bool = False
    units: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    late: bool = False  # gathers begin with the next forward

    def wrap(self, world: World, seed: int | None = None) -> tuple[ShardedDataParallel, ShardedOptimizer]:
        """Wrap the case's module, built from a seed of this rank's own, and build its optimizer."""
        case = ALL_CASES[self.case]
        module = case.build(world.rank + 1 if seed is None else seed).to(world.device)
        settings = {"bucket_size_mb": SMALL_MB, "find_unused_parameters": case.unused, **self.settings}
        if name := settings.pop("communication_dtype", None):
            settings["communication_dtype"] = DTYPES[name]
        units = [module.get_submodule(name) for name in self.units] or None
        model = ShardedDataParallel(module, world.group, stage=self.stage, units=units, **settings)
        kind, options = OPTIMIZERS[self.how]
        if self.late:
            model.gather_late()
        return model, model.optimizer(kind, own_groups(module) if self.groups else None, **options)


class OneProcess:
    """The same training without a wrapper; parameters of 16 bits are stepped in float32 copies."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.module = ALL_CASES[run.case].build(1).to(device)
        for each in self.module.parameters():
            each.data = (
                each.data.contiguous()
            )  # as the wrapper makes them: kernels round otherwise where rows are columns
        kind, options = OPTIMIZERS[run.how]
        groups = own_groups(self.module) if run.groups else [{"params": list(self.module.parameters())}]
        self.stepped = {
            id(each): nn.Parameter(each.detach().float()) if each.itemsize == 2 else each
            for each in self.module.parameters()
        }
        stepped = [{**group, "params": [self.stepped[id(each)] for each in group["params"]]} for group in groups]
        self.optimizer = kind(stepped, **options)

    @torch.no_grad()
    def step(self, gradients: Gradients) -> None:
        for name, each in self.module.named_parameters():
            stepped, gradient = self.stepped[id(each)], gradients.get(name)
            stepped.grad = None if gradient is None else gradient.to(stepped.dtype, copy=True)
        self.optimizer.step()
        for each in self.module.parameters():
            each.copy_(self.stepped[id(each)])


def backwards(world: World, model: ShardedDataParallel, run: Run, offset: int) -> None:
    """Compute this rank's shards: all but the last within `no_sync`; virtual shards if sums are exact."""
    mine = range(offset + world.rank * run.shards, offset + (world.rank + 1) * run.shards)
    for shard in mine:
        with nullcontext() if shard == mine[-1] else model.no_sync():
            ALL_CASES[run.case].loss(model, shard).backward()
        if model.exact and shard != mine[-1]:
            model.next_shard()
    model.finish_gradient_synchronization()


def wrong_training(world: World, run: Run) -> list[str]:
    """Steps must be those of one process, and all ranks must have its parameters."""
    model, optimizer = run.wrap(world)
    case, serial = ALL_CASES[run.case], OneProcess(run, world.device)
    numbers = 0 if model.exact or world.size * run.shards == 1 else world.size * run.shards + 2
    message = model.communication_dtype
    problems: list[str] = []
    for step in range(run.steps):
        offset = step * world.size * run.shards
        optimizer.zero_grad()
        backwards(world, model, run, offset)
        wanted = one_process(case, copy.deepcopy(serial.module), range(offset, offset + world.size * run.shards))
        if not model.exact:
            wanted = _times(wanted, run.shards)
        found: Gradients = {**dict.fromkeys(wanted.means), **model.full_gradients()}
        problems += [f"step {step}: {each}" for each in gradients_apart(found, wanted, numbers, message)]
        gradients = found if numbers else wanted.means
        if run.clip is not None:
            gradients = {name: None if each is None else each.clone() for name, each in gradients.items()}
            problems += [f"step {step}: {each}" for each in _wrong_clip(model, optimizer, run.clip, gradients)]
        serial.step(gradients)
        optimizer.step()
    state = model.state_dict()
    for name, each in serial.module.named_parameters():
        if not same_bits(state[name], each):
            problems.append(f"{name} has other bits after training")
    with model.gather_full() as module:
        return problems + parts_from_rank_0(world, module)


def _times(means: Means, count: int) -> Means:
    """Micro-batches of a rank add up."""
    scaled = {name: None if each is None else each * count for name, each in means.means.items()}
    return Means(scaled, {name: each * count for name, each in means.largest.items()})


def _wrong_clip(
    model: ShardedDataParallel, optimizer: ShardedOptimizer, clip: float, gradients: Gradients
) -> list[str]:
    """Clip both; where bits are not promised, the clipped gradients of the wrapper are taken over."""
    tensors = [each for each in gradients.values() if each is not None]
    norm = reproducible_norm(tensors, reduce=False)
    clip_by(tensors, norm, clip)
    found = optimizer.clip_grad_norm_(clip)
    if model.exact and not same_bits(found, norm):
        return [f"norm {float(found)!r}, wanted the bits of {float(norm)!r}"]
    if not torch.allclose(found.double(), norm, rtol=1e-5):
        return [f"norm {float(found)}, wanted {float(norm)}"]
    clipped = model.full_gradients()
    wrong = [
        f"{name} is clipped otherwise"
        for name, each in clipped.items()
        if not torch.allclose(each.double(), gradients[name].double(), rtol=1e-2 if each.itemsize == 2 else 1e-5)  # type: ignore[union-attr]
    ]
    if not model.exact:
        gradients.update(clipped)
    return wrong


def not_sharded(world: World, stage: int) -> list[str]:
    """What a rank holds in a backward, after it, and after a step must be its share; by memory, not by views of it."""
    run = Run("chain", "adamw", stage, settings={"bucket_size_mb": 16 / 1024})  # four buckets of 16 KiB
    model, optimizer = run.wrap(world)
    before, start, peaks = storages(), model.scatter.start, []
    whole, share = 4 * 2**14, 4 * 2**14 // world.size

    def watched(bucket: Any) -> Any:
        wait = start(bucket)
        peaks.append(_whole_gradients(before, optimizer))
        return wait

    problems: list[str] = []
    with mock.patch.object(model.scatter, "start", watched):
        for step in range(2):
            optimizer.zero_grad()
            backwards(world, model, run, step)
            if any(each.grad is not None for each in model.module.parameters()):
                problems.append("parameters have gradients after the synchronization")
            gradients = memory([flat.grad for flat in model.flat_parameters])
            if gradients != (whole if stage == 1 else share):
                problems.append(f"{gradients} bytes of gradients after a backward")
            if stage == 2 and (left := _whole_gradients(before, optimizer)):
                problems.append(f"whole gradients of {left} bytes are left after a backward")
            optimizer.step()
            model.synchronize()
    if stage == 2 and max(peaks) != 2 * 2**14:  # two buckets: nothing is filled at the time
        problems.append(f"whole gradients of up to {max(peaks)} bytes at a time")
    kept = sum(each.numel() for state in optimizer.inner.state.values() for each in state.values() if each.dim())
    if kept != 2 * share // 4:
        problems.append(f"{kept} elements of optimizer state, wanted {2 * share // 4}")
    parameters = memory([each for flat in model.flat_parameters for each in flat.kept()])
    if parameters != (share if stage == 3 else whole):
        problems.append(f"{parameters} bytes of parameters")
    elements = sum(each.stop - each.start for each in optimizer.held_state() if each.shape)
    held = torch.tensor(elements, device=world.device)
    dist.all_reduce(held, group=world.group)
    if held != 2 * whole // 4:
        problems.append(f"{held} elements of state over all ranks, wanted {2 * whole // 4}")
    return problems


def memory(tensors: Iterable[Tensor | None]) -> int:
    """Sum the bytes of memory of tensors, which may share some."""
    found = [each.untyped_storage() for each in tensors if each is not None]
    return sum({each._cdata: each.nbytes() for each in found}.values())


def storages() -> dict[int, int]:
    """Return the bytes of all tensor memory that Python can reach on this rank, by storage."""
    found = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter):
            storage = each.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def _whole_gradients(before: dict[int, int], optimizer: ShardedOptimizer) -> int:
    """Sum the memory in pieces of a bucket or more that was not there before, but for the optimizer's state."""
    state = {each.untyped_storage()._cdata for kept in optimizer.inner.state.values() for each in kept.values()}
    new = {key: size for key, size in storages().items() if key not in before and key not in state}
    return sum(size for size in new.values() if size >= 2**14)
