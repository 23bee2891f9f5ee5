"""Memory of the states that a rank holds in zero1, zero2 and zero3, against the formulas of `muster memory`, on CPUs.

    launch      fresh ranks on the loopback train a few steps in one mode: VGG-19 of twice the channels (80 M
                parameters), a GPT of 57 M; AdamW. Models are large, for the allocator's slack is some MB with any
    storages    tensor accounting after a step: parameters, gradients, optimizer's state, buffers, each storage once
    growth      of the process's own memory (Pss) from before the model was made until then, free memory given
                back; a tiny model was trained in the same mode before, so that threads and scratch memory are there
    formula     P (4 + 4 + 8) bytes, of which N ranks divide the last (1), the last two (2), all (3); and buffers

The fullest rank counts.

    .venv/bin/python benchmarks/zero_memory.py [--ranks 2,4] [--repeats 3] [--quick]

Reach: storages and growth <= 1.05 of the formula, growth the median of the launches. About 4 minutes; `--quick` 2.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import replace
from typing import Any

from rank_processes import on_loopback

from muster.collectives_bench.cost.load import Load, Recipe
from muster.collectives_bench.cost.memory import memory_of
from muster.collectives_bench.cost.modes import WAYS
from muster.jobs.models.anatomy import anatomy
from muster.jobs.models.shapes import VGG_SHAPES, GptShape, VggShape

REACH = 1.05
STEPS = 3
SAMPLES = 2  # of a rank in a step: what is held is measured, not what passes
LIMIT_S = 300.0
MB = 2**20
MODES = ("zero1", "zero2", "zero3")
VGG = VggShape("vgg19-wide", tuple(2 * width for width in VGG_SHAPES["vgg19"].layers))
GPT = GptShape("gpt-57m", 768, 3072, 8, 8, context=64, vocabulary=512)
SHAPES: dict[str, VggShape | GptShape] = {shape.name: shape for shape in (VGG, GPT)}
TINY: dict[str, VggShape | GptShape] = {
    VGG.name: replace(VGG, layers=(8, 0, 8, 0, 8, 0, 8, 0, 8, 0)),
    GPT.name: replace(GPT, d_model=16, d_ff=32, layers=2, heads=2, context=16),
}


def formula(model: str, mode: str, ranks: int) -> float:
    """Return the bytes of states and buffers."""
    load = Load(anatomy(SHAPES[model]), Recipe(4, 4, 8), ranks=ranks, batch=ranks, microbatches=1, itemsize=4)
    memory = memory_of(WAYS[mode], load)
    assert memory is not None
    return memory.states + memory.buffers


def rank_main(model: str, mode: str) -> None:
    """Be one rank; rank 0 prints what the fullest rank holds."""
    import torch
    import torch.distributed as dist

    from muster.jobs.machine import resident

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(TINY[model], mode)
    resident.give_back()
    before = resident.own_share()
    storages, kept = train(SHAPES[model], mode)
    resident.give_back()
    after = resident.own_share()
    found = torch.tensor([sum(storages.values()), after - before], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    del kept
    if dist.get_rank() == 0:
        print(json.dumps({"storages": found[0].item(), "growth": found[1].item(), "kinds": storages}))
    dist.destroy_process_group()


def train(shape: VggShape | GptShape, mode: str) -> tuple[dict[str, int], Any]:
    """Train some steps; return the bytes of storages by kind, and what holds them."""
    import torch

    from muster.jobs.train.memory.held import bytes_by_kind, tensors_of
    from muster.jobs.train.models.gpt import build_gpt
    from muster.jobs.train.models.units import units_of
    from muster.jobs.train.models.vgg import build_vgg
    from muster.zero import ShardedDataParallel

    module = build_vgg(shape, 0) if isinstance(shape, VggShape) else build_gpt(shape, 0)
    model = ShardedDataParallel(module, stage=WAYS[mode].zero, units=units_of(module))  # type: ignore[arg-type]
    optimizer = model.optimizer(torch.optim.AdamW, lr=1e-4, fused=True)
    for _ in range(STEPS):
        if isinstance(shape, VggShape):
            inputs, targets = torch.randn(SAMPLES, 3, 32, 32), torch.zeros(SAMPLES, dtype=torch.long)
        else:
            inputs = targets = torch.randint(shape.vocabulary, (SAMPLES, shape.context))
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()
        model.synchronize()
    return bytes_by_kind(tensors_of(module, optimizer, model)), (model, optimizer)


def compare(model: str, mode: str, ranks: int, repeats: int) -> bool:
    """Launch, print ratios and a line of JSON; say whether they are in reach."""
    expected = formula(model, mode, ranks)
    found = [on_loopback(__file__, ["--model", model, "--mode", mode], ranks, LIMIT_S) for _ in range(repeats)]
    growths = [each["growth"] / expected for each in found]
    storages, growth = found[0]["storages"] / expected, statistics.median(growths)
    reached = storages <= REACH and growth <= REACH
    told = f"formula {expected / MB:6.1f} MB   storages {storages:.3f}   growth {growth:.3f}"
    print(f"{model:10} {mode} {ranks} ranks  {told}")
    record = {
        "benchmark": f"memory of states, {model}, {mode}, {ranks} ranks",
        "ratio": max(storages, growth),
        "reach": REACH,
        "reached": reached,
        "formula": expected,
        "storages": storages,
        "growth": growths,
        "kinds": found[0]["kinds"],
        "unit": "B",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps(record), flush=True)
    return reached


def main() -> int:
    """Measure every model and mode in every world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=tuple(SHAPES), help="one alone")
    parser.add_argument("--mode", choices=MODES, help="one alone")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one launch of each")
    args = parser.parse_args()
    if args.rank:
        rank_main(args.model, args.mode)
        return 0
    reached = [
        compare(model, mode, ranks, 1 if args.quick else args.repeats)
        for model in ([args.model] if args.model else SHAPES)
        for mode in ([args.mode] if args.mode else MODES)
        for ranks in map(int, args.ranks.split(","))
    ]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
