"""Communication of a sharded training step in a box of four nodes at 1 Gbit/s, against what rings must send.

    a rank's link carries    zero1, zero2   reduce-scatter, all-gather              2 (n - 1) / n x model
                             zero3          all-gather, all-gather, reduce-scatter  3 (n - 1) / n x model, at most
    time     seconds of the slowest rank over the time that a link needs for that: TCP, IP and Ethernet take 66 of every
             1514 bytes, so 1.046 is the least
                 zero1, zero2   from gradients on each rank to parameters on every rank: nothing hides any of it
                 zero3          a whole step
    bytes    payload that the interface of a rank's node sent in a step, the largest of all ranks, over the same

The models have the parameters and units of VGG-11 and of a GPT of 5 M parameters, but layers that compute nothing, and
plain SGD: a step is its communication, its copies, and sums of shards. PyTorch's sides (benchmarks/zero_sides.py) stand
beside, with whole steps, and so does a step in which nothing is sent.

    sudo .venv/bin/python benchmarks/zero_wire.py [--rate 1gbit] [--nodes 4] [--repeats 5] [--steps 3] [--quick]
    .venv/bin/python benchmarks/zero_wire.py --ranks 2 [--quick]          loopback: only to see that it runs

Reach: time and bytes <= 1.10, of exact sums <= 1.15. About 4 minutes; `--quick` 1: VGG-11 alone, and none of PyTorch's.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from rank_processes import in_nodes, on_loopback

NODES = 4
LIMIT_S = 580.0
REACH, REACH_EXACT = 1.10, 1.15
INTERFACES = ("eth1", "lo")  # of a node to the others; a rank that is alone in its node says nothing to itself
MODELS = ("vgg11", "gpt-5m")
TIMES_MODEL = {"zero1": 2, "zero2": 2, "zero3": 3, "ddp": 2, "zero, tuned": 2, "fsdp2": 3}
OURS = {f"{stage}{exact}": stage for exact in ("", " exact") for stage in ("zero1", "zero2", "zero3")}
THEIRS = ("ddp", "zero, tuned", "fsdp2")
ALONE = "alone"


def measure(model: str, sides: Sequence[str], repeats: int, steps: int, *, tiny: bool = False) -> dict[str, Any]:
    """Be one rank, in the default process group: return wall seconds of a step and bytes sent in it, by side."""
    from ddp_models import TASKS, TINY
    from zero_sides import loop_of
    from zero_silent import batches, silent

    module = (TINY if tiny else TASKS)[model].build()
    loops = {
        side: loop_of(
            OURS.get(side, side),
            silent(module),
            batches(),
            "plain sgd",
            **({"exact": side.endswith("exact")} if side in OURS else {}),
        )
        for side in sides
    }
    for loop in loops.values():
        for _ in range(2):
            loop.step()
            loop.rest()
    found: dict[str, dict[str, list[Any]]] = {side: {"steps": [], "bare": []} for side in loops}
    for repeat in range(repeats):
        for side in list(loops)[:: 1 if repeat % 2 == 0 else -1]:
            found[side]["steps"].append(_block(loops[side], steps))
    weights = [loop.weights() for loop in loops.values()]
    for repeat in range(repeats):
        for side in [each for each in loops if each in OURS][:: 1 if repeat % 2 == 0 else -1]:
            found[side]["bare"].append(_bare(loops[side]))
    nbytes = sum(each.nbytes for each in module.parameters())
    apart = max((each - weights[0]).abs().max().item() for each in weights)
    return {"nbytes": nbytes, "sides": found, "apart": apart}


def _block(loop: Any, steps: int) -> tuple[float, float]:
    """Train a block of steps; return a step's wall seconds and bytes, each of the rank that has most."""
    import torch.distributed as dist

    from muster.collectives_bench.ranks.wire import WireCounter

    counter = WireCounter(INTERFACES)
    dist.barrier()
    counter.start()
    began = perf_counter()
    for _ in range(steps):
        loop.step()
    loop.rest()
    seconds, sent = perf_counter() - began, counter.sent()
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":  # all ranks share what is counted
        sent /= dist.get_world_size()
    return _most(seconds) / steps, _most(sent) / steps


def _bare(loop: Any) -> float:
    """Return the seconds of a step of ours without what is no communication, as far as that can be told apart."""
    import torch.distributed as dist

    loop.optimizer.zero_grad()
    if loop.stage < 3:
        with loop.model.no_sync():
            loop.loss().backward()
    dist.barrier()
    began = perf_counter()
    if loop.stage < 3:
        loop.model.finish_gradient_synchronization()
    else:
        loop.loss().backward()
    loop.optimizer.step()
    loop.rest()
    return _most(perf_counter() - began)


def _most(value: float) -> float:
    import torch
    import torch.distributed as dist

    shared = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def rank_main(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {model: measure(model, args.sides, args.repeats, args.steps) for model in args.models}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def launch(args: argparse.Namespace) -> dict[str, Any]:
    """Start fresh ranks, in the nodes of a box or on the loopback; return what they measured."""
    sides = args.sides or [ALONE, *OURS, *(() if args.quick else THEIRS)]
    arguments = [
        "--repeats",
        str(args.repeats),
        "--steps",
        str(args.steps),
        "--models",
        *args.models,
        "--sides",
        *sides,
    ]
    if args.ranks:
        return dict(on_loopback(__file__, arguments, args.ranks, LIMIT_S))
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec, parse_rate

    with box_up(BoxSpec(name=f"zerowire{os.getpid()}", nodes=args.nodes, rate=parse_rate(args.rate))) as box:
        return dict(in_nodes(box, __file__, arguments, LIMIT_S))


def rows_of(model: str, found: dict[str, Any], ranks: int, bits_s: float | None) -> list[dict[str, Any]]:
    """Set every side beside what its links must carry; without a speed there is nothing to say about time."""
    rows = []
    for side, took in found["sides"].items():
        volume = TIMES_MODEL.get(OURS.get(side, side), 0) * (ranks - 1) / ranks * found["nbytes"]
        step, sent = (statistics.median(each[place] for each in took["steps"]) for place in (0, 1))
        bare = statistics.median(took["bare"]) if took["bare"] else None
        row: dict[str, Any] = {"model": model, "side": side, "step_s": step, "bare_s": bare, "sent_bytes": sent, **took}
        row |= {"volume_bytes": volume, "bytes": sent / volume if volume else None}
        row["time"] = bare / (volume * 8 / bits_s) if bare and bits_s else None
        row["reach"] = (REACH_EXACT if side.endswith("exact") else REACH) if side in OURS else None
        held = [each for each in (row["time"], row["bytes"]) if each is not None and row["reach"]]
        row["reached"] = found["apart"] == 0.0 and all(each <= row["reach"] for each in held)
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'':22} {'whole step':>10} {'communication':>14} {'x bound':>8} {'a rank sent':>12} {'x volume':>9}   reach"
    )
    for row in rows:
        time, sent = (f"{row[key]:.3f}" if row[key] else "-" for key in ("time", "bytes"))
        bare = f"{row['bare_s'] * 1e3:.0f} ms" if row["bare_s"] else "-"
        verdict = f"<= {row['reach']:.2f}: {'yes' if row['reached'] else 'NO'}" if row["reach"] else "(beside)"
        print(
            f"{row['model']:8} {row['side']:13} {row['step_s'] * 1e3:7.0f} ms {bare:>14} {time:>8} "
            f"{row['sent_bytes'] / 1e6:9.2f} MB {sent:>9}   {verdict}"
        )


def main() -> int:
    """Measure, compare with the bounds, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sides", nargs="+", choices=(ALONE, *OURS, *THEIRS), help="default: all")
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="in a block")
    parser.add_argument("--quick", action="store_true", help="3 repeats, VGG-11 alone, none of PyTorch's sides")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.models = 3, ["vgg11"]
    if args.rank:
        rank_main(args)
        return 0
    from muster.cloudlab.box.spec import parse_rate

    bits_s = None if args.ranks else parse_rate(args.rate)
    found = launch(args)
    rows = [row for model in found for row in rows_of(model, found[model], args.ranks or args.nodes, bits_s)]
    show(rows)
    reached = all(row["reached"] for row in rows)
    print(f"reach: time and bytes <= {REACH:.2f}, exact <= {REACH_EXACT:.2f}: {'yes' if reached else 'NO'}")
    record = {"benchmark": "zero wire", "reached": reached, "ranks": args.ranks or args.nodes, "rate": bits_s}
    print(json.dumps({**record, "rows": rows}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
