"""A sharded training step, ours against PyTorch's: CPU time and wall time of the same work.

    ranks       one process each, on the loopback or in a box of four nodes; all sides wrap copies of one model, which
                take turns in one process group, A B C C B A in blocks of steps
    CPU time    time.process_time of a block, threads of gloo and system calls too, summed over the ranks
    wall time   of the rank that took longest, from a barrier until nothing is under way any more
    checked     gradients of the first step agree (other buckets sum in another order), and weights after the second

VGG-11 and a GPT of 5 M parameters (benchmarks/ddp_models.py has the sizes and batches), one thread a rank, AdamW for
both; `--optimizer sgd` takes SGD with momentum. `--light` has a sequence and two images a rank, which leaves less to
compute beside what is compared. Sides are those of benchmarks/zero_sides.py.

    .venv/bin/python benchmarks/zero_step.py [--ranks 2,4] [--repeats 9] [--steps 4] [--quick]    loopback
    sudo .venv/bin/python benchmarks/zero_step.py --box 1gbit                                      four nodes

Reach, CPU and wall each, medians of the repeats' ratios: zero1 over ZeroRedundancyOptimizer <= 0.85 as it is by default
and <= 0.97 tuned with GPT, <= 0.83 and <= 0.90 with VGG; zero3 over fully_shard <= 0.70, over DDP <= 1.07. About 6
minutes; `--quick` 2.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rank_processes import in_nodes, on_loopback
from step_sides import CLOCKS, apart, be_a_rank, compared, in_turns, told

NODES = 4
LIMIT_S = 900.0
SAME_GRADIENTS = 1e-5  # of the largest
SAME_WEIGHTS = 0.05  # of the distance that they have moved
MODELS = ("gpt-5m", "vgg11")
LIGHT = {"gpt-5m": 1, "vgg11": 2}  # samples of a rank
FAMILIES = {
    "stages 1, 2": ("zero1", "zero, tuned", "zero, defaults", "zero2"),
    "stage 3": ("zero3", "ddp", "fsdp2"),
}


class Claim(NamedTuple):
    """What is compared with what; `reach` by model, none where it only stands beside."""

    ours: str
    theirs: str
    reach: dict[str, float]


CLAIMS = (
    Claim("zero1", "zero, defaults", {"gpt-5m": 0.85, "vgg11": 0.83}),
    Claim("zero1", "zero, tuned", {"gpt-5m": 0.97, "vgg11": 0.90}),
    Claim("zero2", "zero, defaults", {}),
    Claim("zero2", "zero, tuned", {}),
    Claim("zero3", "fsdp2", {"gpt-5m": 0.70, "vgg11": 0.70}),
    Claim("zero3", "ddp", {"gpt-5m": 1.07, "vgg11": 1.07}),
)


def measure(
    model: str,
    sides: Sequence[str],
    repeats: int,
    steps: int,
    *,
    optimizer: str = "adamw",
    light: bool = False,
    tiny: bool = False,
) -> dict[str, Any]:
    """Be one rank, in the default process group: return the sides' times by repeat, and how far apart they are."""
    import torch.distributed as dist
    from ddp_models import TASKS, TINY
    from zero_sides import loop_of

    task, rank = (TINY if tiny else TASKS)[model], dist.get_rank()
    task = replace(task, samples=LIGHT[model]) if light else task
    loops = {side: loop_of(side, task.build(), task.batches(rank), optimizer) for side in sides}
    before = loops[sides[0]].weights()
    for loop in loops.values():
        loop.step()
    distances = {"gradients": apart([loop.gradients() for loop in loops.values()])}
    for loop in loops.values():  # torch's DDP deals its buckets anew after the first step
        loop.step()
        loop.rest()
    # Now, not at the end: VGG-11 makes a quarter of its way out of a rounding within 40 steps.
    distances["weights"] = apart([loop.weights() - before for loop in loops.values()], norm=2)
    times = in_turns({side: partial(_block, loop, steps) for side, loop in loops.items()}, repeats)
    return {"times": times, "apart": distances}


def _block(loop: Any, steps: int) -> None:
    for _ in range(steps):
        loop.step()
    loop.rest()


def rank_main(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    from muster.ddp.malloc import keep_freed_memory

    def measure_all() -> dict[str, list[dict[str, Any]]]:
        more = {"optimizer": args.optimizer, "light": args.light}
        return {
            model: [measure(model, FAMILIES[each], args.repeats, args.steps, **more) for each in args.families]
            for model in args.models
        }

    keep_freed_memory()  # for all sides, as ranks of jobs do
    be_a_rank(measure_all)


def launch(args: argparse.Namespace, where: int | str) -> dict[str, Any]:
    """Start fresh ranks, as many on the loopback or in a box with links of this speed; return what they measured."""
    arguments = ["--repeats", str(args.repeats), "--steps", str(args.steps), "--optimizer", args.optimizer]
    arguments += ["--models", *args.models, "--families", *args.families, *(["--light"] if args.light else [])]
    if isinstance(where, int):
        return dict(on_loopback(__file__, arguments, where, LIMIT_S))
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec, parse_rate

    with box_up(BoxSpec(name=f"zerostep{os.getpid()}", nodes=NODES, rate=parse_rate(where))) as box:
        return dict(in_nodes(box, __file__, arguments, LIMIT_S))


def rows_of(where: str, model: str, families: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the sides that were measured together, claim by claim."""
    rows = []
    for claim in CLAIMS:
        for found in families:
            if not {claim.ours, claim.theirs} <= found["times"].keys():
                continue
            agree = found["apart"]["gradients"] <= SAME_GRADIENTS and found["apart"]["weights"] <= SAME_WEIGHTS
            row: dict[str, Any] = {"where": where, "model": model, "ours": claim.ours, "against": claim.theirs}
            row |= compared(found["times"][claim.ours], found["times"][claim.theirs])
            reach = claim.reach.get(model)
            reached = agree and all(reach is None or row[clock]["ratio"] <= reach for clock in CLOCKS)
            rows.append({**row, "agree": agree, **found["apart"], "reach": reach, "reached": reached})
    return rows


def show(rows: Sequence[dict[str, Any]], steps: int) -> None:
    """Print the table; times are of one step."""
    print(f"{'':30} {'against':15} {'CPU a step, ours / theirs':>28} {'wall a step, ours / theirs':>28}   reach")
    for row in rows:
        verdict = f"<= {row['reach']:.2f}: {'yes' if row['reached'] else 'NO'}" if row["reach"] else "(beside)"
        named = f"{row['model']:8} {row['where']:13} {row['ours']:7}"
        print(f"{named} {row['against']:15} {told(row, steps)}   {verdict}")
        if not row["agree"]:
            why = f"gradients are {row['gradients']:.1e} apart, weights {row['weights']:.1e}"
            print(f"         {why}: NOT the same work")


def main() -> int:
    """Measure, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", default="2,4", help="on the loopback of this machine")
    parser.add_argument("--box", metavar="RATE", help="instead, four nodes with links of this speed, or none")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--light", action="store_true", help="1 sequence, 2 images a rank")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="in a block")
    parser.add_argument("--quick", action="store_true", help="3 repeats of 2 steps")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.steps = 3, 2
    if args.rank:
        rank_main(args)
        return 0
    rows = []
    for where in [args.box] if args.box else [int(count) for count in args.ranks.split(",")]:
        text = f"{where} ranks, lo" if isinstance(where, int) else f"box, {where}"
        for model, found in launch(args, where).items():
            rows += rows_of(text, model, found)
    show(rows, args.steps)
    reached = all(row["reached"] for row in rows)
    print(f"reach, all of it: {'yes' if reached else 'NO'}")
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "steps": args.steps}
    record = {"benchmark": "zero step", "optimizer": args.optimizer, "light": args.light, "reached": reached, **machine}
    print(json.dumps({**record, "rows": rows}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
