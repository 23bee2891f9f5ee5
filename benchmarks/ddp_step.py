"""A training step with BucketedDDP against torch's DistributedDataParallel: CPU time and wall time of the same work.

    ranks       one process each, in a box of four nodes or on the loopback; all wrap copies of one model, which take
                turns in one process group, A B B A in blocks of steps (with three: A B C C B A)
    CPU time    time.process_time of a block, threads of gloo and system calls too, summed over the ranks
    wall time   of the rank that took longest, from a barrier on
    checked     gradients of the first step agree (other buckets sum in another order), and so do the weights after all

VGG-11 and a GPT of 5 M parameters (benchmarks/ddp_models.py has the sizes and batches), AdamW fused, one thread a rank.
The claim is against torch's with its broadcast of buffers off, for ours has none; the row beside it is torch's default.
Only VGG-11 has buffers.

    sudo .venv/bin/python benchmarks/ddp_step.py [--rates none,1gbit] [--repeats 9] [--steps 2] [--quick]    a box
    .venv/bin/python benchmarks/ddp_step.py --ranks 2 [--quick]                                              loopback

Reach: CPU <= 1.00, wall <= 1.03, medians of the repeats' ratios. About 3 minutes; `--quick` 1.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from rank_processes import in_nodes, on_loopback
from step_sides import apart, be_a_rank, compared, in_turns, told

REACH = {"cpu": 1.00, "wall": 1.03}
NODES = 4
LIMIT_S = 400.0
SAME_GRADIENTS = 1e-5  # of the largest
SAME_WEIGHTS = 0.05  # of the distance that they have moved
SIDES = {"vgg11": ("ours", "torch", "torch, buffers"), "gpt-5m": ("ours", "torch")}


def measure(model: str, repeats: int, steps: int, *, tiny: bool = False) -> dict[str, Any]:
    """Be one rank, in the default process group: return the sides' times by repeat, and how far apart they are."""
    import torch.distributed as dist
    from ddp_models import TASKS, TINY, Loop

    task, rank = (TINY if tiny else TASKS)[model], dist.get_rank()
    loops = {side: Loop(task.build(), side, task.batches(rank)) for side in SIDES[model]}
    before = loops["ours"].weights()
    for loop in loops.values():
        loop.step()
    distances = {"gradients": apart([loop.gradients() for loop in loops.values()])}
    for loop in loops.values():  # torch's deals its buckets anew after the first step
        loop.step()
    times = in_turns({side: partial(_block, loop, steps) for side, loop in loops.items()}, repeats)
    distances["weights"] = apart([loop.weights() - before for loop in loops.values()], norm=2)
    return {"times": times, "apart": distances}


def _block(loop: Any, steps: int) -> None:
    for _ in range(steps):
        loop.step()


def rank_main(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    be_a_rank(lambda: {model: measure(model, args.repeats, args.steps) for model in args.models})


def launch(args: argparse.Namespace, rate: str) -> dict[str, Any]:
    """Start fresh ranks, on the loopback or in a box with links of this speed; return what they measured."""
    arguments = ["--repeats", str(args.repeats), "--steps", str(args.steps), "--models", *args.models]
    if args.ranks:
        return dict(on_loopback(__file__, arguments, args.ranks, LIMIT_S))
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec, parse_rate

    with box_up(BoxSpec(name=f"ddpstep{os.getpid()}", nodes=NODES, rate=parse_rate(rate))) as box:
        return dict(in_nodes(box, __file__, arguments, LIMIT_S))


def rows_of(where: str, model: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare ours with each of the others; a claim is held to reach, torch's default stands beside it."""
    rows = []
    agree = found["apart"]["gradients"] <= SAME_GRADIENTS and found["apart"]["weights"] <= SAME_WEIGHTS
    for side in SIDES[model][1:]:
        row: dict[str, Any] = {"where": where, "model": model, "against": side, "agree": agree, **found["apart"]}
        row |= compared(found["times"]["ours"], found["times"][side])
        row["claim"] = side == "torch"
        row["reached"] = agree and all(row[clock]["ratio"] <= limit for clock, limit in REACH.items())
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], steps: int) -> None:
    """Print the table; times are of one step."""
    print(f"{'':22} {'against':15} {'CPU a step, ours / theirs':>28} {'wall a step, ours / theirs':>28}")
    for row in rows:
        verdict = ("yes" if row["reached"] else "NO") if row["claim"] else "(its default)"
        print(f"{row['model']:8} {row['where']:13} {row['against']:15} {told(row, steps)}   {verdict}")
        if not row["agree"]:
            print(
                f"         gradients are {row['gradients']:.1e} apart, weights {row['weights']:.1e}: NOT the same work"
            )


def main() -> int:
    """Measure, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box")
    parser.add_argument("--rates", default="none,1gbit", help="of the box's links")
    parser.add_argument("--models", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="in a block")
    parser.add_argument("--quick", action="store_true", help="3 repeats of 1 step")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.steps = 3, 1
    if args.rank:
        rank_main(args)
        return 0
    rows = []
    for rate in [""] if args.ranks else args.rates.split(","):
        where = f"{args.ranks} ranks, lo" if args.ranks else f"box, {rate}"
        for model, found in launch(args, rate).items():
            rows += rows_of(where, model, found)
    show(rows, args.steps)
    reached = all(row["reached"] for row in rows if row["claim"])
    print(f"reach: CPU <= {REACH['cpu']:.2f}, wall <= {REACH['wall']:.2f}: {'yes' if reached else 'NO'}")
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "steps": args.steps}
    print(json.dumps({"benchmark": "ddp step", "reach": REACH, "reached": reached, **machine, "rows": rows}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
