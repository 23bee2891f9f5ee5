"""A step of a pipeline over tokens (TeraPipe) beside GPipe with one micro-batch, on four nodes of a box.

An 8-block GPT in float32, batch 1, T = 2048: GPipe then runs one stage after another, 2 blocks each. Slices of the
sequence run at the same time on different stages (Li et al. 2021). Sides: 8 slices of equal length, and GPipe; in
turns, in one run of four ranks with one thread each.

    sudo .venv/bin/python benchmarks/terapipe.py [--width 512] [--rate 1gbit] [--repeats 7] [--quick]
    .venv/bin/python benchmarks/terapipe.py --ranks 4                       loopback

GPipe keeps one core busy at a time. So on two cores, four ranks cannot do better than half of the work. Eight slices
take 11 % more than whole sequences (smaller products, sums of gradients, masks, concatenations), and filling and
draining adds 1/32 of the work, so the bound is 0.59. Reach: slices take at most 0.6 of GPipe's time.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from harness import Options, finish, ratio_of, spread, table, turns, verdict
from ranks import on_ranks, place

REACH = 0.6
TOKENS, BLOCKS, HEADS, VOCABULARY = 2048, 8, 8, 256
SLICES = 8


def measure(width: int, repeats: int) -> dict[str, list[float]]:
    """Be one rank: measure the sides in turns; return their seconds per step."""
    from muster.ddp.malloc import keep_freed_memory
    from muster.jobs.models.shapes import GptShape
    from muster.jobs.train.models.gpt import build_gpt
    from muster.jobs.train.models.stack import mean_loss
    from muster.pipe import Pipeline
    from muster.pipe.schedules.tables import schedule

    torch.set_num_threads(1)
    keep_freed_memory()  # as every training job does
    ranks = dist.get_world_size()
    shape = GptShape("gpt", width, 4 * width, BLOCKS, HEADS, context=TOKENS, vocabulary=VOCABULARY)
    drawn = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    cuts = [1 + BLOCKS * rank // ranks for rank in range(ranks)]
    cuts[0] = 0

    lengths = {"slices": (TOKENS // SLICES,) * SLICES, "gpipe": ()}
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
    return found


def main() -> int:
    """Measure and report."""
    parser = Options(__doc__, repeats=7, quick={"repeats": 3, "width": 128})
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box")
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    args = parser.parse_args()
    with place(args.ranks, args.rate) as there:
        seconds = on_ranks(measure, there, limit_s=580.0, width=args.width, repeats=args.repeats)
    row = {"name": f"terapipe, width {args.width}", **ratio_of(seconds["slices"], seconds["gpipe"])}
    row["reached"] = row["ratio"] <= REACH
    table(["step", "of GPipe's"], [[f"{statistics.median(row['ours']):.3f} s", spread(row)]])
    print(f"{SLICES} slices: {row['ratio']:.3f}; {verdict(row['reached'], REACH)}")
    return finish(args, "terapipe", [row], reach=REACH, machine_cores=os.cpu_count())


if __name__ == "__main__":
    sys.exit(main())
