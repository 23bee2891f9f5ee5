"""Communication of a sharded training step in a box of four nodes at 1 Gbit/s, against what rings must send.

    a rank's link carries    zero1, zero2   reduce-scatter, all-gather              2 (n - 1) / n x model
                             zero3          all-gather, all-gather, reduce-scatter  3 (n - 1) / n x model, at most
    time     seconds of the slowest rank over the time that a link needs for that: TCP, IP and Ethernet take 66 of every
             1514 bytes, so 1.046 is the least
                 zero1, zero2   from gradients on each rank to parameters on every rank: nothing hides any of it
                 zero3          a whole step
    bytes    payload that the interface of a rank's node sent in a step, the largest of all ranks, over the same

The models have the parameters and units of VGG-11 and of a GPT of 5 M parameters, but layers that compute nothing, and
plain SGD: a step is its communication, its copies, and sums of shards. PyTorch's sides (benchmarks/train_sides.py)
stand beside, with whole steps, and so does a step in which nothing is sent.

    sudo .venv/bin/python benchmarks/zero_wire.py [--rate 1gbit] [--nodes 4] [--repeats 5] [--steps 3] [--quick]
    .venv/bin/python benchmarks/zero_wire.py --ranks 2 [--quick]          loopback: only to see that it runs

Reach: time and bytes <= 1.10, of exact sums <= 1.15. About 4 minutes; `--quick` 1.
"""

import os
import statistics
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from harness import Options, finish, table, turns, verdict
from ranks import most, on_ranks, place
from torch import Tensor, nn

NODES = 4
LIMIT_S = 580.0
REACH, REACH_EXACT = 1.10, 1.15
INTERFACES = ("eth1", "lo")  # of a node to the others; a rank that is alone in its node says nothing to itself
MODELS = ("vgg11", "gpt-5m")
TIMES_MODEL = {"zero1": 2, "zero2": 2, "zero3": 3, "ddp": 2, "zero, tuned": 2, "fsdp2": 3}
OURS = {f"{stage}{exact}": stage for exact in ("", " exact") for stage in ("zero1", "zero2", "zero3")}
THEIRS = ("ddp", "zero, tuned", "fsdp2")
ALONE = "alone"


class _Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        """Hand on."""
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Hand on, with ones for every parameter."""
        return (grad, None, *ctx.gradients)


class Silent(nn.Module):
    """A layer with parameters like some others that hands on its input; its gradients are ones, not written anew."""

    def __init__(self, like: "list[nn.Parameter]") -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(each.detach().clone()) for each in like)
        self.ones = [torch.ones_like(each) for each in like]  # no buffers: nobody need send them

    def forward(self, x: Tensor) -> Tensor:
        """Return what was given; every parameter counts as used."""
        result: Tensor = _Silent.apply(x, self.ones, *self.weights)
        return result


def silent(module: nn.Module) -> nn.Sequential:
    """Build a block for each unit of a model, between what of the root comes before and after them."""
    from train_sides import units_of

    units = units_of(module)
    inside = {id(each): number for number, unit in enumerate(units) for each in unit}
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    seen: set[int] = set()
    for name, child in module.named_children():
        if (number := inside.get(id(child))) is not None:
            name, child = f"block{number + 1}", nn.ModuleList(units[number])
        new = [each for each in child.parameters() if id(each) not in seen]
        seen |= {id(each) for each in new}
        if new:
            layers[name] = Silent(new)
    return nn.Sequential(layers)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the loss takes for a batch: two logits that no weight changes."""
    while True:
        yield torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)


def measure(model: str, sides: Sequence[str], repeats: int, steps: int, *, tiny: bool = False) -> dict[str, Any]:
    """Be one rank: return wall seconds of a step and bytes sent in it, by side."""
    from ddp_models import TASKS, TINY
    from train_sides import Loop

    module = (TINY if tiny else TASKS)[model].build()
    loops = {
        side: Loop(
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
            loop.block(1)
    whole = turns({side: partial(_block, loop, steps) for side, loop in loops.items()}, repeats)
    weights = [loop.weights() for loop in loops.values()]
    bare = turns({side: partial(_bare, loop) for side, loop in loops.items() if side in OURS}, repeats)
    found = {side: {"steps": whole[side], "bare": bare.get(side, [])} for side in loops}
    nbytes = sum(each.nbytes for each in module.parameters())
    apart = max((each - weights[0]).abs().max().item() for each in weights)
    return {"nbytes": nbytes, "sides": found, "apart": apart}


def _block(loop: Any, steps: int) -> tuple[float, float]:
    """Train a block of steps; return a step's wall seconds and bytes, each of the rank that has most."""
    from muster.collectives_bench.ranks.wire import WireCounter

    counter = WireCounter(INTERFACES)
    dist.barrier()
    counter.start()
    began = perf_counter()
    loop.block(steps)
    seconds, sent = perf_counter() - began, counter.sent()
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":  # all ranks share what is counted
        sent /= dist.get_world_size()
    seconds, sent = most(seconds, sent)
    return seconds / steps, sent / steps


def _bare(loop: Any) -> float:
    """Return the seconds of a step of ours without what is no communication, as far as that can be told apart."""
    gathers = loop.side == "zero3"
    loop.optimizer.zero_grad()
    if not gathers:
        with loop.model.no_sync():
            loop.loss().backward()
    dist.barrier()
    began = perf_counter()
    if not gathers:
        loop.model.finish_gradient_synchronization()
    else:
        loop.loss().backward()
    loop.optimizer.step()
    loop.rest()
    return most(perf_counter() - began)[0]


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


def line_of(row: dict[str, Any]) -> list[str]:
    """Write a row of the table."""
    time, sent = (f"{row[key]:.3f}" if row[key] else "-" for key in ("time", "bytes"))
    bare = f"{row['bare_s'] * 1e3:.0f} ms" if row["bare_s"] else "-"
    measured = [f"{row['step_s'] * 1e3:.0f} ms", bare, time, f"{row['sent_bytes'] / 1e6:.2f} MB", sent]
    return [row["model"], row["side"], *measured, verdict(row["reached"], row["reach"])]


def main() -> int:
    """Measure, compare with the bounds, report."""
    note = "3 repeats, VGG-11 alone, none of PyTorch's sides"
    parser = Options(__doc__, repeats=5, quick={"repeats": 3, "models": ["vgg11"]}, note=note)
    parser.add_argument("--sides", nargs="+", choices=(ALONE, *OURS, *THEIRS), help="default: all")
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=3, help="in a block")
    args = parser.parse_args()
    from muster.cloudlab.box.spec import parse_rate

    sides = args.sides or [ALONE, *OURS, *(() if args.quick else THEIRS)]
    bits_s, ranks = None if args.ranks else parse_rate(args.rate), args.ranks or args.nodes
    rows = []
    with place(args.ranks, args.rate, args.nodes) as there:
        for model in args.models:
            settings = {"model": model, "sides": sides, "repeats": args.repeats, "steps": args.steps}
            rows += rows_of(model, on_ranks(measure, there, limit_s=LIMIT_S, **settings), ranks, bits_s)
    head = ["", "", "whole step", "communication", "x bound", "a rank sent", "x volume", "reach"]
    table(head, map(line_of, rows))
    return finish(args, "zero wire", rows, ranks=ranks, rate=bits_s)


if __name__ == "__main__":
    sys.exit(main())
