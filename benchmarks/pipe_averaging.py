"""Communication that averaging leaves exposed at the end of a step of two pipelines side by side, in a box.

    flat        one all-reduce of all gradients of a slice, when its rank's row of the schedule is over
    bucketed    an all-reduce a bucket, as soon as the last micro-batch's backward has made its last gradient whole
    zero1       the same, scattered; the parameters are gathered before the next step
    exposed     from the end of the last backward of all ranks until the last rank may start its optimizer: all nodes of
                a box have one clock; "alone" averages nothing, and shows what the end of a row costs by itself

    stage 1   ... F B F B            |           |
    stage 0   ... F B . B            |           |
    average             ---------------------------
                                     |<-exposed->|           reach: bucketed <= 1.00 of flat

VGG-11 on 2 x 2 ranks, each in a node of its own, sides in turns in one process group.

    sudo .venv/bin/python benchmarks/pipe_averaging.py [--rate 1gbit] [--schedules 1f1b,interleaved,zbv] [--quick]
    .venv/bin/python benchmarks/pipe_averaging.py --ranks 4 [--quick]                              loopback

Medians of the repeats' ratios. About 4 minutes; `--quick` 1.
"""

import argparse
import json
import os
import statistics
import sys
from contextlib import nullcontext
from time import monotonic
from typing import Any

from rank_processes import in_nodes, on_loopback

REACH = 1.0
NODES = 4
LIMIT_S = 500.0
SIDES = {"alone": {"sync": "flat"}, "flat": {"sync": "flat"}, "bucketed": {"sync": "bucketed"}, "zero1": {"zero": 1}}
JOB = {"model": "vgg11", "data": "digits", "batch_size": 64, "evaluate": False, "steps": 1}
TINY = {"model": {"layers": 2, "d_model": 16, "d_ff": 32, "heads": 2, "context": 8}, "data": "synthetic"}


def measure(schedules: list[str], repeats: int, microbatches: int, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Be one rank, in the default process group: return a row of seconds by side for each schedule."""
    return [_measure(schedule, repeats, microbatches, {**JOB, **(TINY if tiny else {})}) for schedule in schedules]


def _measure(schedule: str, repeats: int, microbatches: int, job: dict[str, Any]) -> dict[str, Any]:
    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.train.data import open_data
    from muster.jobs.train.data.loading import move

    split = {"data": 2, "pipe": 2, "schedule": schedule, "microbatches": microbatches}
    sides = {name: TrainSettings.model_validate({**job, "parallel": {**split, **more}}) for name, more in SIDES.items()}
    data = open_data(sides["flat"])
    trainers = {name: _trainer(settings, data) for name, settings in sides.items()}
    trainers["alone"].engine.stages._averaging = nullcontext
    own = trainers["flat"]
    work = move(own.own_steps()[0], own.world.device, own.dtype)
    times: dict[str, dict[str, list[float]]] = {name: {"step": [], "exposed": []} for name in trainers}
    for repeat in range(-2, repeats):  # two rounds to warm up
        for name in list(trainers)[:: 1 if repeat % 2 == 0 else -1]:
            step, exposed = _step(trainers[name], work.shards)
            if repeat >= 0:
                times[name]["step"].append(step)
                times[name]["exposed"].append(exposed)
    return {"schedule": schedule, "microbatches": microbatches, "times": times}


def _step(trainer: Any, shards: Any) -> tuple[float, float]:
    """Train a step; return the seconds of all of it but the optimizer, and of what follows the last backward."""
    import torch
    import torch.distributed as dist

    from muster.pipe.schedules.actions import Action

    engine, ended = trainer.engine, []
    engine._advance = lambda: ended.append(monotonic())
    dist.barrier()
    began = monotonic()
    engine.train_step(0, shards)
    worked = max(span.end_s for span in engine.stages.pipeline.spans if isinstance(span.step, Action))
    moments = torch.tensor([-began, worked, ended[0]], dtype=torch.float64)
    dist.all_reduce(moments, dist.ReduceOp.MAX)
    return (moments[2] + moments[0]).item(), (moments[2] - moments[1]).item()


def _trainer(settings: Any, data: Any) -> Any:
    import torch
    import torch.distributed as dist

    from muster.jobs.train.loop import build_trainer
    from muster.jobs.world.world import World

    return build_trainer(
        settings, data, World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    )


def rank_main(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from muster.ddp.malloc import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    found = measure(args.schedules, args.repeats, args.microbatches)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def launch(args: argparse.Namespace) -> Any:
    """Start fresh ranks, on the loopback or in a box; return what they measured."""
    arguments = ["--repeats", str(args.repeats), "--microbatches", str(args.microbatches)]
    arguments += ["--schedules", ",".join(args.schedules)]
    if args.ranks:
        return on_loopback(__file__, arguments, args.ranks, LIMIT_S)
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec, parse_rate

    with box_up(BoxSpec(name=f"averaging{os.getpid()}", nodes=NODES, rate=parse_rate(args.rate))) as box:
        return in_nodes(box, __file__, arguments, LIMIT_S)


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """Add to a row its medians, and what bucketed exposes of what flat does, repeat by repeat."""
    for what in ("step", "exposed"):
        row[what] = {name: statistics.median(times[what]) for name, times in row["times"].items()}
    pairs = zip(row["times"]["bucketed"]["exposed"], row["times"]["flat"]["exposed"], strict=True)
    row["ratios"] = [ours / theirs for ours, theirs in pairs]
    row["ratio"] = statistics.median(row["ratios"])
    row["reached"] = row["ratio"] <= REACH
    return row


def main() -> int:
    """Measure, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box")
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=["1f1b", "interleaved", "zbv"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="the first schedule, 3 repeats")
    args = parser.parse_args()
    if args.quick:
        args.schedules, args.repeats = args.schedules[:1], 3
    if args.rank:
        rank_main(args)
        return 0
    rows = [judged(row) for row in launch(args)]
    where = f"{args.ranks} ranks, loopback" if args.ranks else f"box, {NODES} nodes at {args.rate}"
    print(f"VGG-11, 2 pipelines of 2 ranks, {args.microbatches} micro-batches, {where}")
    print(f"  {'exposed':>12} {' '.join(f'{name:>8}' for name in SIDES)}   bucketed of flat")
    for row in rows:
        times = " ".join(f"{row['exposed'][name]:>6.3f} s" for name in SIDES)
        spread = f"{row['ratio']:.3f} ({min(row['ratios']):.3f} .. {max(row['ratios']):.3f})"
        print(f"  {row['schedule']:>12} {times}   {spread}; reach <= {REACH}: {'yes' if row['reached'] else 'NO'}")
    print(json.dumps({"benchmark": "pipe averaging", "where": where, "reach": REACH, "rows": rows}))
    return 0 if all(row["reached"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
