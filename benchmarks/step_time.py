"""A training step, ours against PyTorch's: CPU time and wall time of the same work, by groups of sides.

    ddp           BucketedDDP beside DistributedDataParallel without and with its broadcast of buffers (only VGG-11 has
                  any), a box of four nodes, links unshaped and at 1 Gbit/s
    zero1, zero3  ShardedDataParallel beside ZeroRedundancyOptimizer, DistributedDataParallel and fully_shard, loopback.
                  Of these three groups benchmarks/train_sides.py has the sides, benchmarks/ddp_models.py the models
    1f1b, zero bubble, interleaved
                  pipe.Pipeline beside torch.distributed.pipelining (benchmarks/pipe_sides.py), loopback: forward and
                  backward of 8 micro-batches of a GPT, gradients from none, no optimizer. d128 has 1 x 64 tokens a
                  micro-batch, d256 4 x 64 and a third of the steps. Our zb1p and zbv are fitted to what actions and
                  messages take in the shortest of 12 steps ahead of all: PyTorch's have no such setting

    ranks       one process each, on one thread; the sides of a group have copies of one model, and take turns in one
                process group, A B C C B A in blocks of steps
    CPU time    time.process_time of a block, threads of gloo and system calls too, summed over the ranks
    wall time   of the rank that took longest, from a barrier until nothing is under way any more
    checked     of ddp and zero: gradients of the first step (other buckets sum in another order), weights after the
                second. Of pipelines: gradients and loss against a loop in one process, first step and last

    .venv/bin/python benchmarks/step_time.py --groups zero1 zero3 [--ranks 2,4] [--quick]       loopback
    sudo .venv/bin/python benchmarks/step_time.py --groups ddp [--rates none,1gbit]             four nodes

`--light` has a sequence and two images a rank, which leaves less to compute beside what is compared. Reach: medians of
the repeats' ratios, CPU and wall as CLAIMS says. Minutes: ddp 3, zero 6, pipelines 4; `--quick` a third.
"""

import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from harness import CLOCKS, Options, by_clock, clock_cells, finish, numbers, table, turns
from ranks import on_ranks, place, timed

MICROBATCHES = 8
FITTING = 3  # times the four batches are stepped with to fit a table
LIGHT = {"gpt-5m": 1, "vgg11": 2}  # samples of a rank
MODELS, SIZES = ("gpt-5m", "vgg11"), ("d128", "d256")
# Gradients and loss as a share of the largest, weights of the distance that they have moved.
LIMITS = {"gradients": 1e-5, "weights": 0.05, "loop": 1e-5}


class Group(NamedTuple):
    """Sides that are measured together."""

    sides: tuple[str, ...]
    sizes: tuple[str, ...]
    repeats: int
    steps: int  # of a block
    rates: tuple[str, ...] = ()  # of a box's links; without, ranks of the loopback


GROUPS = {
    "ddp": Group(("bucketed", "ddp", "ddp, buffers"), MODELS, 9, 2, ("none", "1gbit")),
    "zero1": Group(("zero1", "zero, tuned", "zero, defaults", "zero2"), MODELS, 9, 4),
    "zero3": Group(("zero3", "ddp", "fsdp2"), MODELS, 9, 4),
    "1f1b": Group(("1f1b", "torch 1f1b", "gpipe", "torch gpipe"), SIZES, 15, 6),
    "zero bubble": Group(("zb1p", "torch zb", "zbv", "torch zbv", "1f1b"), SIZES, 15, 6),
    "interleaved": Group(("interleaved", "torch interleaved"), SIZES, 15, 6),
}


class Claim(NamedTuple):
    """What is compared with what; `reach` by size for CPU and wall time, none where it only stands beside."""

    ours: str
    theirs: str
    reach: dict[str, tuple[float, float]] = {}  # noqa: RUF012 - never changed
    ranks: tuple[int, ...] = ()  # that it holds for; without any: all


def both(**reach: float) -> dict[str, tuple[float, float]]:
    """Hold CPU and wall time to the same."""
    return {size.replace("_", "-"): (each, each) for size, each in reach.items()}


CLAIMS = (
    Claim("bucketed", "ddp", dict.fromkeys(MODELS, (1.00, 1.03))),
    Claim("bucketed", "ddp, buffers"),
    Claim("zero1", "zero, defaults", both(gpt_5m=0.85, vgg11=0.83)),
    Claim("zero1", "zero, tuned", both(gpt_5m=0.97, vgg11=0.90)),
    Claim("zero2", "zero, defaults"),
    Claim("zero2", "zero, tuned"),
    Claim("zero3", "fsdp2", both(gpt_5m=0.70, vgg11=0.70)),
    Claim("zero3", "ddp", both(gpt_5m=1.07, vgg11=1.07)),
    Claim("1f1b", "torch 1f1b", both(d128=1.00, d256=1.00), (2, 4)),
    Claim("gpipe", "torch gpipe"),
    Claim("interleaved", "torch interleaved"),
    Claim("zb1p", "torch zb", both(d128=0.80), (2,)),
    Claim("zbv", "torch zbv", both(d128=0.80), (2,)),
    Claim("zb1p", "1f1b"),
    Claim("zbv", "1f1b"),
)


def measure(group: str, sides: Sequence[str], size: str, repeats: int, steps: int, **settings: Any) -> dict[str, Any]:
    """Be one rank: return the sides' times by repeat, and how far each is from the first of them, or from a loop."""
    from muster.ddp.malloc import keep_freed_memory

    if group != "ddp":
        keep_freed_memory()  # for all sides, as ranks of jobs do
    return (measure_pipes if size in SIZES else measure_training)(sides, size, repeats, steps, **settings)


def measure_training(
    sides: Sequence[str],
    size: str,
    repeats: int,
    steps: int,
    *,
    optimizer: str = "adamw",
    light: bool = False,
    tiny: bool = False,
) -> dict[str, Any]:
    """Measure wrapped models."""
    import torch.distributed as dist
    from ddp_models import TASKS, TINY
    from train_sides import Loop, apart

    task, rank = (TINY if tiny else TASKS)[size], dist.get_rank()
    task = replace(task, samples=LIGHT[size]) if light else task
    loops = {side: Loop(side, task.build(), task.batches(rank), optimizer) for side in sides}
    before = loops[sides[0]].weights()
    for loop in loops.values():
        loop.step()
    gradients = {side: loop.gradients() for side, loop in loops.items()}
    for loop in loops.values():  # torch's DDP deals its buckets anew after the first step
        loop.block(1)
    # Now, not at the end: VGG-11 makes a quarter of its way out of a rounding within 40 steps.
    weights = {side: loop.weights() - before for side, loop in loops.items()}
    distances = {
        side: {
            "gradients": apart([gradients[sides[0]], gradients[side]]),
            "weights": apart([weights[sides[0]], weights[side]], norm=2),
        }
        for side in sides
    }
    del gradients, weights
    times = turns({side: partial(timed, partial(loop.block, steps)) for side, loop in loops.items()}, repeats)
    return {"times": times, "apart": distances, "costs_s": {}}


def measure_pipes(
    sides: Sequence[str], size: str, repeats: int, steps: int, *, tiny: bool = False, **_: Any
) -> dict[str, Any]:
    """Measure pipelines, each with a table that is fitted first where its kind has one."""
    from pipe_sides import TASKS, TINY, LoopSide, OurSide, side_of, zero_grad

    task = TINY if tiny else TASKS[size]
    stream = task.batches(MICROBATCHES)
    batches = [next(stream) for _ in range(4)]
    made = {kind: side_of(kind, task.layers(), MICROBATCHES) for kind in sides}
    costs = {
        kind: side.fit(task.layers(), batches * FITTING) for kind, side in made.items() if isinstance(side, OurSide)
    }
    loop = LoopSide(task.layers(), MICROBATCHES)
    apart = {kind: [apart_of(side, loop, batches[0])] for kind, side in made.items()}
    for side, batch in itertools.product(made.values(), batches):
        side.step(*batch)

    def block(side: Any) -> None:
        for number in range(steps):
            zero_grad(side)
            side.step(*batches[number % len(batches)])

    times = turns({kind: partial(timed, partial(block, side)) for kind, side in made.items()}, repeats)
    for kind, side in made.items():  # a step that leaves something behind is found out only later
        apart[kind].append(apart_of(side, loop, batches[1]))
    fitted = {kind: asdict(each) for kind, each in costs.items() if each is not None}
    return {"times": times, "apart": {kind: {"loop": max(found)} for kind, found in apart.items()}, "costs_s": fitted}


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


def rows_of(where: str, ranks: int, size: str, found: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Compare the sides that were measured together, claim by claim; times are of one step."""
    rows = []
    for claim in CLAIMS:
        if not {claim.ours, claim.theirs} <= found["times"].keys():
            continue
        apart = {side: found["apart"][side] for side in (claim.ours, claim.theirs)}
        agree = all(each <= LIMITS[what] for side in apart.values() for what, each in side.items())
        row: dict[str, Any] = {"where": where, "size": size, "ours": claim.ours, "against": claim.theirs}
        row |= by_clock(found["times"][claim.ours], found["times"][claim.theirs], steps)
        reach = claim.reach.get(size) if not claim.ranks or ranks in claim.ranks else None
        within = reach is None or all(row[clock]["ratio"] <= each for clock, each in zip(CLOCKS, reach, strict=True))
        row |= {"apart": apart, "agree": agree, "costs_s": found["costs_s"].get(claim.ours)}
        rows.append({**row, "reach": reach, "reached": agree and within})
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    lines = []
    for row in rows:
        told = "(beside)" if row["reach"] is None else "<= {:.2f}, {:.2f}: ".format(*row["reach"])
        told += "" if row["reach"] is None else "yes" if row["reached"] else "NO"
        told += "" if row["agree"] else f"; {row['apart']}: NOT the same work"
        lines.append([row["size"], row["where"], row["ours"], row["against"], *clock_cells(row), told])
    table(["", "", "ours", "against", "CPU a step, ours / theirs", "wall a step, ours / theirs", "reach"], lines)


def sides_of(group: str, size: str, only: Sequence[str]) -> list[str]:
    """List the sides of a group that are asked for; a GPT has no buffers to broadcast."""
    sides = [side for side in GROUPS[group].sides if side != "ddp, buffers" or size == "vgg11"]
    return [side for side in sides if side in only] if only else sides


def play(group: str, args: Any) -> list[dict[str, Any]]:
    """Measure a group wherever it is asked for; return its rows."""
    rows = []
    each = GROUPS[group]
    repeats, steps = args.repeats or each.repeats, args.steps or each.steps
    if args.quick:
        repeats, steps = max(3, repeats // 3), max(1, steps // 2)
    rates = args.rates.split(",") if args.rates else [] if args.ranks else each.rates
    for ranks, rate in [(4, rate) for rate in rates] or [(ranks, "") for ranks in args.ranks or (2, 4)]:
        where = f"box, {rate}" if rate else f"{ranks} ranks, lo"
        with place(None if rate else ranks, rate) as there:
            for size in (size for size in each.sizes if size in args.sizes):
                count = max(1, steps // 3) if size == "d256" else steps
                sides = sides_of(group, size, args.sides)
                settings = {"optimizer": args.optimizer, "light": args.light}
                found = on_ranks(
                    measure, there, group=group, sides=sides, size=size, repeats=repeats, steps=count, **settings
                )
                rows += rows_of(where, ranks, size, found, count)
                for side, times in found["times"].items() if args.sides else ():
                    cpu, wall = (statistics.median(of_clock) * 1e3 / count for of_clock in zip(*times, strict=True))
                    print(f"{where} {size} {side}: CPU {cpu:.1f} ms, wall {wall:.1f} ms a step, {found['apart'][side]}")
    return rows


def main() -> int:
    """Measure, compare, report."""
    parser = Options(__doc__, repeats=0, quick={}, note="a third of the repeats, half of the steps")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--sizes", nargs="+", choices=MODELS + SIZES, default=MODELS + SIZES)
    parser.add_argument("--sides", nargs="+", default=[], help="these alone; one is compared with nothing")
    parser.add_argument("--ranks", type=numbers, help="numbers of ranks on the loopback of this machine")
    parser.add_argument("--rates", help="instead, four nodes of a box with links of these speeds, or none")
    parser.add_argument("--light", action="store_true", help="1 sequence, 2 images a rank")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--steps", type=int, default=0, help="in a block")
    args = parser.parse_args()
    rows = [row for group in args.groups for row in play(group, args)]
    show(rows)
    return finish(args, "step time", rows, optimizer=args.optimizer, light=args.light)


if __name__ == "__main__":
    sys.exit(main())
