"""Memory of a rank on CPUs: BucketedDDP's peak, the states of zero1 to zero3, the activations of 1F1B.

    ddp         growth of a rank that trains 4 steps, BucketedDDP over PyTorch's DDP (benchmarks/ddp_models.py, four
                times its batches), AdamW: the peak of the resident set (VmHWM, set back first) less what stood before
                the model was wrapped: buckets, gradients, optimizer states, activations, and what gloo takes. The mean
                of the ranks; fresh ranks for each side, in turns, A B B A. A tiny model was trained before, so that the
                libraries' own pages are there. PyTorch's buckets are made anew in its second step
    zero        what the fullest rank holds after 3 steps, over the formula of `muster memory`: P (4 + 4 + 8) bytes, of
                which N ranks divide the last (1), the last two (2), all (3); and buffers. VGG-19 of twice the channels
                (80 M), a GPT of 57 M, for the allocator's slack is some MB with any model
                    storages    tensor accounting: parameters, gradients, optimizer's state, buffers, each once
                    growth      of the process's own memory (Pss) from before the model was made, free memory given
                                back; a tiny model was trained in the same mode before. The median of the launches
    pipe        bytes of all tensors that live on a rank at the end of a forward of its stage, the most in a step, less
                parameters, gradients and the batch: what the graphs keep, messages and their buffers too. Every
                operation of the rank passes a TorchDispatchMode, which counts each storage from its making to its end.
                Stage s of p holds min(p - s, m) micro-batches with 1F1B instead of m: 1F1B over that share of GPipe.
                PyTorch's two schedules stand beside. Nothing is timed: a busy machine does no harm

    .venv/bin/python benchmarks/memory.py [--rows ddp zero pipe] [--ranks 2,4] [--repeats 5] [--quick]

Reach: ddp 1.00, zero 1.05 for both, pipe 1.10 on every stage. About 2, 4 and 1 minutes; `--quick` half. Linux only.
"""

import itertools
import statistics
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from harness import Options, compare, finish, numbers, turns, verdict
from ranks import most, on_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from muster.collectives_bench.cost.load import RankLoad, Recipe
from muster.collectives_bench.cost.memory import memory_of
from muster.collectives_bench.cost.modes import WAYS
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.shapes import VGG_SHAPES, GptShape, VggShape

if TYPE_CHECKING:
    from pipe_sides import Side, Task

REACH = {"ddp": 1.00, "zero": 1.05, "pipe": 1.10}
LIMIT_S = 300.0
MB = 2**20

# ddp: a model in one of two wrappers.

DDP_STEPS = 4
BATCHES = 4  # of ddp_models'
BOTH = ("bucketed", "ddp")


def peak(model: str, side: str, *, tiny: bool = False) -> dict[str, float]:
    """Be one rank: return the mean bytes of all ranks."""
    from ddp_models import TASKS, TINY
    from train_sides import Loop

    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))  # threads and connections are there before anything counts
    Loop(side, TINY[model].build(), TINY[model].batches(rank)).block(DDP_STEPS)
    task = (TINY if tiny else TASKS)[model]
    task = replace(task, samples=BATCHES * task.samples)
    module = task.build()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    Loop(side, module, task.batches(rank)).block(DDP_STEPS)
    highest = _status("VmHWM")
    found = torch.tensor([highest - before, highest], dtype=torch.float64)
    dist.all_reduce(found)
    growth, whole = (found / dist.get_world_size()).tolist()
    return {"growth": growth, "peak": whole}


def _status(key: str) -> int:
    """Return a size of /proc/self/status in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def ddp_row(model: str, ranks: int, repeats: int) -> dict[str, Any]:
    """Launch both sides in turn, compare."""
    sides = {side: partial(on_ranks, peak, ranks, limit_s=LIMIT_S, model=model, side=side) for side in BOTH}
    found = turns(sides, repeats, warm_up=1)
    growth = [[each["growth"] / MB for each in found[side]] for side in BOTH]
    whole = {side: statistics.median(each["peak"] / MB for each in found[side]) for side in BOTH}
    row = compare(
        f"peak memory, {model}, {ranks} ranks", *growth, reach=REACH["ddp"], unit="MB", ranks=ranks, peak_mb=whole
    )
    print("  with libraries and model: ours {:.1f} MB, theirs {:.1f} MB".format(*whole.values()))
    return row


# zero: states against the formula.

ZERO_STEPS = 3
SAMPLES = 2  # of a rank in a step: what is held is measured, not what passes
MODES = ("zero1", "zero2", "zero3")
VGG = VggShape("vgg19-wide", tuple(2 * width for width in VGG_SHAPES["vgg19"].layers))
GPT = GptShape("gpt-57m", 768, 3072, 8, 8, context=64, vocabulary=512)
SHAPES: dict[str, VggShape | GptShape] = {shape.name: shape for shape in (VGG, GPT)}
SMALL: dict[str, VggShape | GptShape] = {
    VGG.name: replace(VGG, layers=(8, 0, 8, 0, 8, 0, 8, 0, 8, 0)),
    GPT.name: replace(GPT, d_model=16, d_ff=32, layers=2, heads=2, context=16),
}


def states(model: str, mode: str) -> dict[str, Any]:
    """Be one rank: return what the fullest rank holds."""
    from muster.jobs.machine import resident

    train(SMALL[model], mode)
    resident.give_back()
    before = resident.own_share()
    storages, kept = train(SHAPES[model], mode)
    resident.give_back()
    after = resident.own_share()
    held, growth = most(sum(storages.values()), after - before)
    del kept
    return {"storages": held, "growth": growth, "kinds": storages}


def train(shape: VggShape | GptShape, mode: str) -> tuple[dict[str, int], Any]:
    """Train some steps; return the bytes of storages by kind, and what holds them."""
    from muster.jobs.train.memory.held import bytes_by_kind, tensors_of
    from muster.jobs.train.models.gpt import build_gpt
    from muster.jobs.train.models.units import own_units
    from muster.jobs.train.models.vgg import build_vgg
    from muster.zero import ShardedDataParallel

    module = build_vgg(shape, 0) if isinstance(shape, VggShape) else build_gpt(shape, 0)
    model = ShardedDataParallel(module, stage=WAYS[mode].zero, units=own_units(module))  # type: ignore[arg-type]
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    for _ in range(ZERO_STEPS):
        if isinstance(shape, VggShape):
            inputs, targets = torch.randn(SAMPLES, 3, 32, 32), torch.zeros(SAMPLES, dtype=torch.long)
        else:
            inputs = targets = torch.randint(shape.vocabulary, (SAMPLES, shape.context))
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()
        model.synchronize()
    return bytes_by_kind(tensors_of(module, optimizer, model)), (model, optimizer)


def zero_row(model: str, mode: str, ranks: int, repeats: int) -> dict[str, Any]:
    """Launch, compare with the bytes of states and buffers."""
    load = RankLoad(anatomy(SHAPES[model]), Recipe(4, 4, 8), ranks=ranks, batch=ranks, microbatches=1, itemsize=4)
    memory = memory_of(WAYS[mode], load)
    assert memory is not None
    expected = memory.states + memory.buffers
    found = [on_ranks(states, ranks, limit_s=LIMIT_S, model=model, mode=mode) for _ in range(repeats)]
    growths = [each["growth"] / expected for each in found]
    storages, growth = found[0]["storages"] / expected, statistics.median(growths)
    reached = max(storages, growth) <= REACH["zero"]
    told = f"formula {expected / MB:6.1f} MB   storages {storages:.3f}   growth {growth:.3f}"
    print(f"{model:10} {mode} {ranks} ranks  {told}   {verdict(reached, REACH['zero'])}", flush=True)
    row = {"name": f"memory of states, {model}, {mode}, {ranks} ranks", "ratio": max(storages, growth)}
    row |= {"reach": REACH["zero"], "reached": reached, "formula": expected, "storages": storages}
    return {**row, "growth": growths, "kinds": found[0]["kinds"], "unit": "B"}


# pipe: activations.

PIPE_STEPS = 3
MICROBATCHES = 16
FAMILIES = {"ours": ("gpipe", "1f1b"), "torch": ("torch gpipe", "torch 1f1b")}
SIZE = "d128"


class Living(TorchDispatchMode):
    """Counts the bytes of storages that operations have made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: dict[int, int] = {}  # by the number of the storage
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.made = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see what it made."""
        result = operation(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self.see(each)
        return result

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it goes."""
        storage = tensor.untyped_storage()
        if storage not in self.numbers:
            self.made += 1
            self.numbers[storage] = self.made
            self.bytes_of[self.made] = storage.nbytes()
            weakref.finalize(storage, self.bytes_of.pop, self.made, None)

    def total(self, but: Sequence[Tensor]) -> int:
        """Return the bytes of what lives, without some tensors."""
        left_out = {self.numbers.get(each.untyped_storage()) for each in but}
        return sum(size for number, size in self.bytes_of.items() if number not in left_out)


def in_flight(kind: str, task: "Task", microbatches: int) -> int:
    """Return the most bytes that this rank's stage holds at the end of a forward."""
    from pipe_sides import parameters_of, side_of, zero_grad

    stream, highest = task.batches(microbatches), 0
    living = Living()

    def look(*_: object) -> None:
        nonlocal highest
        if side is not None:
            mine = [each for _, each in parameters_of(side)]
            highest = max(highest, living.total([*mine, *(each.grad for each in mine if each.grad is not None)]))

    side: Side | None = None
    batches = [next(stream) for _ in range(PIPE_STEPS)]
    layers = task.layers()
    with living:
        side = side_of(kind, layers, microbatches)
        for last in (list(module.children())[-1] for module in side.modules()):
            last.register_forward_hook(look)
        for batch in batches:
            zero_grad(side)
            side.step(*batch)
    return highest


def activations(microbatches: int) -> dict[str, list[int]]:
    """Be one rank: return what every stage holds with every side."""
    from pipe_sides import TASKS

    found = {}
    for kind in itertools.chain(*FAMILIES.values()):
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, in_flight(kind, TASKS[SIZE], microbatches))
        found[kind] = held
    return found


def bound(ranks: int, stage: int, microbatches: int) -> float:
    """Return the share of GPipe's activations that a stage holds with 1F1B."""
    return min(ranks - stage, microbatches) / microbatches


def pipe_rows(ranks: int, microbatches: int, found: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Compare 1F1B with GPipe, stage by stage; print it."""
    rows = []
    for side, kinds in FAMILIES.items():
        reach = REACH["pipe"] if side == "ours" else None
        for stage, (gpipe, held) in enumerate(zip(*(found[kind] for kind in kinds), strict=True)):
            share, wanted = held / gpipe, bound(ranks, stage, microbatches)
            reached = reach is None or share / wanted <= reach
            row = {"ranks": ranks, "stage": stage, "side": side, "gpipe_bytes": gpipe, "held_bytes": held}
            rows.append({**row, "share": share, "bound": wanted, "ratio": share / wanted, "reached": reached})
            told = f"gpipe {gpipe / MB:7.2f} MB, 1f1b {held / MB:7.2f} MB, share {share:.4f} of bound {wanted:.4f}"
            print(f"{ranks} ranks, stage {stage} {side:6} {told}: {share / wanted:.3f}   {verdict(reached, reach)}")
    return rows


def main() -> int:
    """Measure what is asked for, compare, report."""
    parser = Options(__doc__, repeats=0, quick={}, note="2 launches of each side of ddp, 1 of zero's")
    parser.add_argument("--rows", nargs="+", choices=REACH, default=list(REACH))
    parser.add_argument("--models", nargs="+", choices=("vgg11", "gpt-5m", *SHAPES), help="these alone")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of zero")
    parser.add_argument("--ranks", type=numbers, help="default: 2 for ddp, 2,4 for the others")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    args = parser.parse_args()
    rows = []
    if "ddp" in args.rows:
        repeats = args.repeats or (2 if args.quick else 5)
        models = [model for model in ("vgg11", "gpt-5m") if model in (args.models or [model])]
        rows += [ddp_row(model, ranks, repeats) for ranks in args.ranks or [2] for model in models]
    if "zero" in args.rows:
        repeats = args.repeats or (1 if args.quick else 3)
        models = [model for model in SHAPES if model in (args.models or [model])]
        cells = itertools.product(models, args.modes, args.ranks or [2, 4])
        rows += [zero_row(model, mode, ranks, repeats) for model, mode, ranks in cells]
    for ranks in (args.ranks or [2, 4]) if "pipe" in args.rows else ():
        found = on_ranks(activations, ranks, limit_s=LIMIT_S, microbatches=args.microbatches)
        rows += pipe_rows(ranks, args.microbatches, found)
    return finish(args, "memory", rows)


if __name__ == "__main__":
    sys.exit(main())
