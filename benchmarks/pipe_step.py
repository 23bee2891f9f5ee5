"""A step of a pipeline, ours against torch.distributed.pipelining: CPU time and wall time of the same work.

    ranks       one process each, on the loopback; all sides run copies of one model, cut the same way, in turns within
                one process group, A B C C B A in blocks of steps
    a step      forward and backward of 8 micro-batches, gradients from none; no optimizer, which costs all the same
    our tables  of zb1p and zbv are fitted to what actions and messages take in the shortest of 12 steps ahead of all:
                PyTorch's have no such setting
    CPU time    time.process_time of a block, threads of gloo and system calls too, summed over the ranks
    wall time   of the rank that took longest, from a barrier until its last step is over
    checked     gradients and loss against a loop over the micro-batches in one process, first step and last

A GPT of 8 blocks (benchmarks/pipe_sides.py has sizes and sides), one thread a rank: d128, 1 x 64 tokens a micro-batch,
and d256, 4 x 64 tokens.

    .venv/bin/python benchmarks/pipe_step.py [--ranks 2,4] [--repeats 15] [--steps 6] [--quick]

Reach, CPU and wall each, medians of the repeats' ratios: 1f1b over Schedule1F1B <= 1.00 on 2 and 4 ranks; with d128 on
2 ranks zb1p over ScheduleInterleavedZeroBubble and zbv over ScheduleZBVZeroBubble <= 0.80. About 4 minutes;
`--quick` 1.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rank_processes import on_loopback, timed

LIMIT_S = 900.0
MICROBATCHES = 8
FITTING = 3  # times the four batches are stepped with to fit a table
CLOCKS = ("cpu", "wall")
SAME = 1e-5  # of the largest gradient, and of the loss
SIZES = ("d128", "d256")
FAMILIES = {
    "1f1b": ("1f1b", "torch 1f1b", "gpipe", "torch gpipe"),
    "zero bubble": ("zb1p", "torch zb", "zbv", "torch zbv", "1f1b"),
    "interleaved": ("interleaved", "torch interleaved"),
}


class Claim(NamedTuple):
    """What is compared with what; `reach` by (ranks, size), none where it only stands beside."""

    ours: str
    theirs: str
    reach: dict[tuple[int, str], float]


ALL = {(ranks, size): 1.00 for ranks in (2, 4) for size in SIZES}
SMALL = {(2, "d128"): 0.80}
CLAIMS = (
    Claim("1f1b", "torch 1f1b", ALL),
    Claim("gpipe", "torch gpipe", {}),
    Claim("interleaved", "torch interleaved", {}),
    Claim("zb1p", "torch zb", SMALL),
    Claim("zbv", "torch zbv", SMALL),
    Claim("zb1p", "1f1b", {}),
    Claim("zbv", "1f1b", {}),
)


def measure(size: str, kinds: Sequence[str], repeats: int, steps: int, *, tiny: bool = False) -> dict[str, Any]:
    """Be one rank, in the default process group: return the sides' times by repeat, and how far each is from a loop."""
    import torch
    from pipe_sides import TASKS, TINY, LoopSide, OurSide, side_of

    task = TINY if tiny else TASKS[size]
    stream = task.batches(MICROBATCHES)
    batches = [next(stream) for _ in range(4)]
    sides = {kind: side_of(kind, task.layers(), MICROBATCHES) for kind in kinds}
    costs = {
        kind: side.fit(task.layers(), batches * FITTING) for kind, side in sides.items() if isinstance(side, OurSide)
    }
    loop = LoopSide(task.layers(), MICROBATCHES)
    apart = {kind: [apart_of(side, loop, batches[0])] for kind, side in sides.items()}
    for side, batch in itertools.product(sides.values(), batches):
        side.step(*batch)
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in sides}
    for repeat in range(repeats):
        for kind in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            times[kind].append(_block(sides[kind], batches, steps))
    for kind, side in sides.items():  # a step that leaves something behind is found out only later
        apart[kind].append(apart_of(side, loop, batches[1]))
    assert torch.get_num_threads() == 1 or tiny
    fitted = {kind: asdict(each) for kind, each in costs.items() if each is not None}
    return {"times": times, "apart": {kind: max(found) for kind, found in apart.items()}, "costs_s": fitted}


def apart_of(side: Any, loop: Any, batch: tuple[Any, Any]) -> float:
    """Return how far a side's gradients and loss are from the loop's, the larger of both: a collective."""
    import torch
    import torch.distributed as dist
    from pipe_sides import whole_gradient, zero_grad

    losses, flat = [], []
    for each in (loop, side):
        zero_grad(each)
        loss = each.step(*batch)
        loss = torch.tensor(-torch.inf) if loss is None else loss.float()
        dist.all_reduce(loss, dist.ReduceOp.MAX)  # on one rank where it is PyTorch's
        losses.append(loss.item())
        flat.append(whole_gradient(each, loop.layers))
    gradients = ((flat[1] - flat[0]).abs().max() / flat[0].abs().max()).item()
    return max(gradients, abs(losses[1] - losses[0]) / losses[0])


def _block(side: Any, batches: Sequence[tuple[Any, Any]], steps: int) -> tuple[float, float]:
    """Run a block of steps; return the CPU seconds of all ranks and the wall seconds of the slowest."""
    from pipe_sides import zero_grad

    def block() -> None:
        for number in range(steps):
            zero_grad(side)
            side.step(*batches[number % len(batches)])

    return timed(block)


def rank_main(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from muster.ddp.malloc import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # for all sides, as ranks of jobs do
    dist.init_process_group("gloo")
    found = {
        size: [
            measure(size, kinds_of(family, args.only), args.repeats, steps_of(size, args.steps))
            for family in args.families
        ]
        for size in args.sizes
    }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def steps_of(size: str, steps: int) -> int:
    """Return the steps of a block: fewer of the large ones."""
    return steps if size == "d128" else max(1, steps // 3)


def kinds_of(family: str, only: str) -> list[str]:
    """List a family's sides, or those of ours or of PyTorch's alone."""
    return [kind for kind in FAMILIES[family] if only in ("", "torch" if kind.startswith("torch") else "ours")]


def rows_of(ranks: int, size: str, families: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Compare the sides that were measured together, claim by claim."""
    rows = []
    for claim, found in itertools.product(CLAIMS, families):
        if not {claim.ours, claim.theirs} <= found["times"].keys():
            continue
        apart = {kind: found["apart"][kind] for kind in (claim.ours, claim.theirs)}
        agree = max(apart.values()) <= SAME
        row: dict[str, Any] = {"ranks": ranks, "size": size, "ours": claim.ours, "against": claim.theirs}
        for place, clock in enumerate(CLOCKS):
            mine, theirs = ([each[place] / steps for each in found["times"][kind]] for kind in apart)
            ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
            row[clock] = {"ratio": statistics.median(ratios), "ratios": ratios, "ours": mine, "theirs": theirs}
        reach = claim.reach.get((ranks, size))
        reached = agree and all(reach is None or row[clock]["ratio"] <= reach for clock in CLOCKS)
        row |= {"costs_s": found["costs_s"].get(claim.ours), "apart": apart, "agree": agree}
        rows.append({**row, "reach": reach, "reached": reached})
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table; times are of one step."""
    print(f"{'':27} {'against':18} {'CPU a step, ours / theirs':>29} {'wall a step, ours / theirs':>29}   reach")
    for row in rows:
        texts = []
        for clock in CLOCKS:
            mine, theirs = (1e3 * statistics.median(row[clock][side]) for side in ("ours", "theirs"))
            texts.append(f"{mine:7.1f} / {theirs:6.1f} ms  {row[clock]['ratio']:6.3f}")
        verdict = f"<= {row['reach']:.2f}: {'yes' if row['reached'] else 'NO'}" if row["reach"] else "(beside)"
        named = f"{row['ranks']} ranks {row['size']:5} {row['ours']:12}"
        print(f"{named} {row['against']:18} {texts[0]:>29} {texts[1]:>29}   {verdict}")
        if not row["agree"]:
            print(f"         from a loop in one process: {row['apart']}: NOT the same work")


def main() -> int:
    """Measure, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", default="2,4", help="on the loopback of this machine")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--only", choices=("ours", "torch", ""), default="", help="these sides, compared with nothing")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=6, help="in a block")
    parser.add_argument("--quick", action="store_true", help="5 repeats of 4 steps")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.steps = 5, 4
    if args.rank:
        rank_main(args)
        return 0
    rows = []
    arguments = ["--repeats", str(args.repeats), "--steps", str(args.steps), "--sizes", *args.sizes]
    arguments += ["--families", *args.families, *(["--only", args.only] if args.only else [])]
    for ranks in map(int, args.ranks.split(",")):
        for size, families in on_loopback(__file__, arguments, ranks, LIMIT_S).items():
            steps = steps_of(size, args.steps)
            rows += rows_of(ranks, size, families, steps)
            for found in families if args.only else ():
                for kind, times in found["times"].items():
                    cpu, wall = (statistics.median(each) * 1e3 / steps for each in zip(*times, strict=True))
                    told = f"CPU {cpu:6.1f} ms, wall {wall:6.1f} ms a step, {found['apart'][kind]:.1e} from a loop"
                    print(f"{ranks} ranks {size} {kind:18} {told}")
    show(rows)
    reached = bool(rows) and all(row["reached"] for row in rows)
    print(f"reach, all of it: {'yes' if reached else 'NO'}")
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "steps": args.steps}
    print(json.dumps({"benchmark": "pipe step", "reached": reached, **machine, "rows": rows}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
