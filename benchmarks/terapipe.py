"""A step of a pipeline over tokens (TeraPipe) beside GPipe with one micro-batch, on four nodes of a box.

An 8-block GPT in float32, batch 1, T = 2048: GPipe then runs one stage after another, 2 blocks each. Slices of the
sequence run at the same time on different stages (Li et al. 2021). Sides: slices of equal length, slices chosen from
measured times (`pipe/slice_times.py`), and GPipe; in turns, in one run of four ranks with one thread each.

    sudo .venv/bin/python benchmarks/terapipe.py [--width 512] [--rate 1gbit] [--repeats 7] [--quick]
    .venv/bin/python benchmarks/terapipe.py --ranks 4                       loopback

GPipe keeps one core busy at a time. So on two cores, four ranks cannot do better than half of the work. Eight slices
take 11 % more than whole sequences (smaller products, sums of gradients, masks, concatenations), and filling and
draining adds 1/32 of the work, so the bound is 0.59. Reach: the better of the two
sides takes at most 0.6 of GPipe's time.
"""

import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from harness import Options, finish, ratio_of, spread, table, turns, verdict
from ranks import on_ranks, place

REACH = 0.6
TOKENS, BLOCKS, HEADS, VOCABULARY = 2048, 8, 8, 256
EQUAL = 8  # slices


def measure(width: int, repeats: int) -> dict[str, Any]:
    """Be one rank: measure the sides in turns; return their seconds per step, and the chosen slices."""
    from torch import nn

    from muster.ddp.malloc import keep_freed_memory
    from muster.jobs.models.shapes import GptShape
    from muster.jobs.train.models.gpt import build_gpt
    from muster.jobs.train.models.stack import mean_loss
    from muster.pipe import Pipeline
    from muster.pipe.schedules.slicing import SliceTimes, best_slices
    from muster.pipe.schedules.tables import schedule
    from muster.pipe.slice_times import slice_times

    torch.set_num_threads(1)
    keep_freed_memory()  # as every training job does
    ranks = dist.get_world_size()
    shape = GptShape("gpt", width, 4 * width, BLOCKS, HEADS, context=TOKENS, vocabulary=VOCABULARY)
    drawn = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    cuts = [1 + BLOCKS * rank // ranks for rank in range(ranks)]
    cuts[0] = 0

    numbers = torch.zeros(3, dtype=torch.float64)
    if dist.get_rank() == 0:
        stage = nn.Sequential(*(build_gpt(shape, 0)[1 + block] for block in range(BLOCKS // ranks)))
        times = slice_times(stage, torch.randn(1, TOKENS, width))
        numbers += torch.tensor([times.fixed, times.per_token, times.per_pair], dtype=torch.float64)
    dist.broadcast(numbers, 0)
    lengths = {
        "equal": (TOKENS // EQUAL,) * EQUAL,
        "chosen": best_slices(TOKENS, ranks, 1, SliceTimes(*numbers.tolist())),
        "gpipe": (),
    }
    pipelines = {
        side: Pipeline(
            build_gpt(shape, 0),
            schedule("terapipe" if tokens else "gpipe", ranks, 1, slices=len(tokens) or 1),
            loss=mean_loss,
            cuts=cuts,
            tokens=tokens,
        )
        for side, tokens in lengths.items()
    }

    def step(side: str) -> float:
        dist.barrier()
        began_s = time.perf_counter()
        pipelines[side].step(drawn[:, :-1], drawn[:, 1:])
        took = torch.tensor(time.perf_counter() - began_s)
        pipelines[side].module.zero_grad(set_to_none=False)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    found = turns({side: lambda side=side: step(side) for side in pipelines}, repeats, warm_up=2)
    dist.barrier()
    return {"seconds": found, "lengths": lengths, "fitted": numbers.tolist()}


def main() -> int:
    """Measure and report."""
    parser = Options(__doc__, repeats=7, quick={"repeats": 3, "width": 128})
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box")
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    args = parser.parse_args()
    with place(args.ranks, args.rate) as there:
        found = on_ranks(measure, there, limit_s=580.0, width=args.width, repeats=args.repeats)
    seconds = found["seconds"]
    sides = {side: ratio_of(seconds[side], seconds["gpipe"]) for side in ("equal", "chosen")}
    lines = [
        [side, "x".join(map(str, found["lengths"][side])), f"{statistics.median(row['ours']):.3f} s", spread(row)]
        for side, row in sides.items()
    ]
    table(["slices", "tokens", "step", "of GPipe's"], lines)
    best = min(sides, key=lambda side: sides[side]["ratio"])
    row = {"name": f"terapipe, {best}, width {args.width}", **sides[best], "sides": sides, "lengths": found["lengths"]}
    row["reached"] = row["ratio"] <= REACH
    print(f"the better one: {best}, {row['ratio']:.3f}; {verdict(row['reached'], REACH)}")
    return finish(args, "terapipe", [row], reach=REACH, machine_cores=os.cpu_count(), fitted=found["fitted"])


if __name__ == "__main__":
    sys.exit(main())
