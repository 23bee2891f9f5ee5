"""Activation memory of 1F1B against GPipe, ours, and what PyTorch's two schedules hold beside them.

    ranks       one process each, on the loopback, each with one stage of a GPT of 8 blocks, the blocks dealt evenly;
                embedding and head are small
    in flight   bytes of all tensors that live on a rank at the end of a forward of its stage, the most in a step, less
                parameters, gradients and the batch: what the graphs keep, messages and their buffers too. Every
                operation of the rank passes a TorchDispatchMode, which counts each storage from its making to its end
    bound       stage s holds min(p - s, m) micro-batches instead of m: that share of what GPipe holds there

    .venv/bin/python benchmarks/pipe_memory.py [--ranks 2,4] [--microbatches 16]

Reach: on every stage the share is <= 1.10 of the bound. About 1 minute. Nothing is timed: a busy machine does no harm.
"""

import argparse
import json
import os
import platform
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from pipe_sides import TASKS, Side, Task, parameters_of, side_of, zero_grad
from rank_processes import on_loopback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REACH = 1.10
LIMIT_S = 300.0
STEPS = 3
FAMILIES = {"ours": ("gpipe", "1f1b"), "torch": ("torch gpipe", "torch 1f1b")}
SIZE = "d128"


class Living(TorchDispatchMode):
    """Counts the bytes of storages that operations have made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: dict[int, int] = {}  # by the number of the storage
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.made = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see what it made."""
        result = operation(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self.see(each)
        return result

    def see(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it goes."""
        storage = tensor.untyped_storage()
        if storage not in self.numbers:
            self.made += 1
            self.numbers[storage] = self.made
            self.bytes_of[self.made] = storage.nbytes()
            weakref.finalize(storage, self.bytes_of.pop, self.made, None)

    def total(self, but: Sequence[Tensor]) -> int:
        """Return the bytes of what lives, without some tensors."""
        left_out = {self.numbers.get(each.untyped_storage()) for each in but}
        return sum(size for number, size in self.bytes_of.items() if number not in left_out)


def in_flight(kind: str, task: Task, microbatches: int) -> int:
    """Return the most bytes that this rank's stage holds at the end of a forward."""
    stream, most = task.batches(microbatches), 0
    living = Living()

    def look(*_: object) -> None:
        nonlocal most
        if side is not None:
            mine = [each for _, each in parameters_of(side)]
            most = max(most, living.total([*mine, *(each.grad for each in mine if each.grad is not None)]))

    side: Side | None = None
    batches = [next(stream) for _ in range(STEPS)]
    layers = task.layers()
    with living:
        side = side_of(kind, layers, microbatches)
        for last in (list(module.children())[-1] for module in side.modules()):
            last.register_forward_hook(look)
        for batch in batches:
            zero_grad(side)
            side.step(*batch)
    return most


def rank_main(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints what every stage holds with every side."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for kind in (kind for family in args.families for kind in FAMILIES[family]):
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, in_flight(kind, TASKS[SIZE], args.microbatches))
        found[kind] = held
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def bound(ranks: int, stage: int, microbatches: int) -> float:
    """Return the share of GPipe's activations that a stage holds with 1F1B."""
    return min(ranks - stage, microbatches) / microbatches


def rows_of(ranks: int, microbatches: int, found: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Compare 1F1B with GPipe, stage by stage; print it."""
    rows = []
    for family in (family for family, (gpipe, _) in FAMILIES.items() if gpipe in found):
        for stage, (most, held) in enumerate(zip(*(found[kind] for kind in FAMILIES[family]), strict=True)):
            share, wanted = held / most, bound(ranks, stage, microbatches)
            over = share / wanted
            reached = family != "ours" or over <= REACH
            row = {"ranks": ranks, "stage": stage, "side": family, "gpipe_bytes": most, "held_bytes": held}
            rows.append({**row, "share": share, "bound": wanted, "ratio": over, "reached": reached})
            told = f"gpipe {most / 2**20:7.2f} MB, 1f1b {held / 2**20:7.2f} MB, share {share:.4f} of bound {wanted:.4f}"
            verdict = ("yes" if reached else "NO") if family == "ours" else "(beside)"
            print(f"{ranks} ranks, stage {stage} {family:6} {told}: {over:.3f}   <= {REACH}: {verdict}")
    return rows


def main() -> int:
    """Measure every number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, with commas")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    args = parser.parse_args()
    if args.rank:
        rank_main(args)
        return 0
    rows = []
    arguments = ["--microbatches", str(args.microbatches), "--families", *args.families]
    for ranks in map(int, args.ranks.split(",")):
        rows += rows_of(ranks, args.microbatches, on_loopback(__file__, arguments, ranks, LIMIT_S))
    reached = bool(rows) and all(row["reached"] for row in rows)
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"benchmark": "pipe memory", "reach": REACH, "reached": reached, **machine, "rows": rows}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
