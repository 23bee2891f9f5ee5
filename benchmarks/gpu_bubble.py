"""The bubble of a pipeline's step on GPUs as measured, beside the simulated one with the measured mean costs.

    python benchmarks/gpu_bubble.py --gpus 4 --out FOLDER            python benchmarks/gpu_bubble.py --smoke --gpus 2

GPT medium in bf16, cut by work over all GPUs of one host, micro-batches of 4 sequences of 1024 tokens: forward and
backward of 4, 8 and 16 of them, with every schedule. Actions are replayed as CUDA graphs, so that GPUs and not their
hosts are what takes time; `--eager` does without. What is measured is what `Pipeline.spans` says: events on the
stream that computes, turned into seconds, ranks' clocks compared by pings. Beside it the simulator, with the means of
what actions and messages took in the same step, and the formula, of stages alike. Medians of the steps.

Reach: at most 3 points between measured and simulated, in every cell; about 90 s on 4 GPUs. `records.jsonl.gz` in the
folder has every action of every step. Ranks are started once; what rank 0 has said until something fails is kept.
"""

import copy
import gc
import gzip
import itertools
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pipe_bubble
import torch
import torch.distributed as dist
from gpu_stage import Stage
from harness import Options, finish
from ranks import hear, say
from torch import nn

MODEL = "gpt-medium"
SAMPLES = 4  # of a micro-batch
FIRST_WARM_UP, WARM_UP = 6, 4  # steps, of which the second records graphs; the first cell's kernels are loaded too
RECORDS = "records.jsonl.gz"
DIGITS = 7  # of a second


class Rank(Stage):
    """One rank among the others, with the model that all cells cut."""

    def __init__(self, order: dict[str, Any]) -> None:
        from gpu_sides import Scene, build_model

        super().__init__(smoke=order["smoke"], limit_s=60.0)
        self.order = order
        self.scene = Scene(MODEL, SAMPLES, self.rank, self.ranks, self.device, self.smoke, microbatches=1)
        layers = nn.Sequential(OrderedDict(build_model(self.scene).named_children()))
        self.layers = layers.to(torch.float32 if self.smoke else torch.bfloat16)

    def cell(self, name: str, microbatches: int, warm_up: int) -> None:
        """Measure a schedule with so many micro-batches; rank 0 tells the row and keeps the records."""
        from pipe_sides import OurSide

        from muster.pipe.timeline import clock_offsets, gather

        began_s = time.monotonic()
        context, vocabulary = self.scene.shape["context"], self.scene.shape["vocabulary"]
        generator = torch.Generator(self.device).manual_seed(1)
        size = (microbatches * SAMPLES, context + 1)
        tokens = torch.randint(vocabulary, size, generator=generator, device=self.device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        layers = copy.deepcopy(self.layers)  # a zero bubble's stay split
        graphs = {"cuda_graphs": True} if self.order["graphs"] and not self.smoke else {}
        pipeline = OurSide(name, layers, microbatches, sized=(SAMPLES, context), **graphs).pipeline
        del layers
        built_s = time.monotonic()
        offsets, records, loss = clock_offsets(self.control), [], float("nan")
        for step in range(warm_up + self.order["steps"]):
            pipeline.module.zero_grad(set_to_none=True)
            self.synchronize()
            dist.barrier(self.control)
            loss = float(pipeline.step(inputs, targets))
            found = gather(pipeline.spans, self.control, offsets)
            if step >= warm_up and found is not None:
                records.append(found)
        if not records:
            return
        about = {
            "schedule": name,
            "microbatches": microbatches,
            "uncertainty_s": max(each.uncertainty_s for each in offsets),
        }
        row = pipe_bubble.row_of("gpu", pipeline.schedule, about, records)
        actions = [list(map(str, each)) for each in pipeline.schedule.actions]
        self.keep({**about, "cuts": pipeline.cuts, "actions": actions}, records)
        seconds = {"build_s": built_s - began_s, "measure_s": time.monotonic() - built_s}
        say("row", row={**row, "loss": loss, **seconds})

    def rest(self) -> None:
        """Let the memory of the last cell's graphs go."""
        gc.collect()
        if not self.smoke:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        dist.barrier(self.control)

    def keep(self, found: dict[str, Any], records: list[list[Any]]) -> None:
        """Append a cell's records to the file."""
        steps = [
            [[each.rank, each.kind, each.stage, each.microbatch, *_short(each.start_s, each.end_s)] for each in step]
            for step in records
        ]
        with gzip.open(Path(self.order["out"]) / RECORDS, "at") as file:
            file.write(json.dumps({**found, "steps": steps}) + "\n")


def _short(*seconds: float) -> list[float]:
    return [round(each, DIGITS) for each in seconds]


def rank_main(**order: Any) -> None:
    """Be one rank of all cells."""
    rank = Rank(order)
    say("ready", ranks=rank.ranks, torch=torch.__version__, device=rank.device_name)
    warm_up = FIRST_WARM_UP
    for name, microbatches in itertools.product(order["schedules"], order["microbatches"]):
        rank.cell(name, microbatches, warm_up)
        warm_up = WARM_UP
        rank.rest()
    dist.barrier(rank.control)
    say("done")
    os._exit(0)  # without taking every communicator down


def tell(row: dict[str, Any]) -> None:
    """Print a row as it comes, and below it what actions took."""
    pipe_bubble.show([row])
    costs = {name: _in_ms(times) for name, times in row["costs"].items()}
    points = " ".join(f"{each:+.1f}" for each in row["steps"])
    print(f"    ms: F {costs['forward']}  I {costs['input_gradient']}  W {costs['weight_gradient']}", end="")
    print(f"  message {costs['message']}; step {1e3 * row['step_s']:.1f}, simulated {1e3 * row['simulated_s']:.1f}")
    print(f"    points of steps {points}; clock +-{1e6 * row['clock_s']:.0f} us; ", end="")
    print(f"built in {row['build_s']:.1f} s, measured in {row['measure_s']:.1f} s; loss {row['loss']:.4f}", flush=True)


def _in_ms(seconds: float | Sequence[float]) -> str:
    return " ".join(f"{1e3 * each:.2f}" for each in (seconds if isinstance(seconds, Sequence) else [seconds]))


def judged(said: list[dict[str, Any]], wanted: int) -> list[dict[str, Any]]:
    """Print the table; return its rows, and one that is not reached if fewer than are wanted, or ranks that failed."""
    rows = [each["row"] for each in said if each["say"] == "row"]
    failed = [{**each, "reached": False} for each in said if each["say"] == "failed"]
    if len(rows) < wanted and not failed:
        failed = [{"say": "failed", "why": f"{len(rows)} of {wanted} cells were measured", "reached": False}]
    pipe_bubble.show(rows)
    for each in failed:
        print(f"  PROBLEM: {each['why']}", flush=True)
    return [*rows, *failed]


def main() -> int:
    """Measure all cells, report."""
    parser = Options(__doc__)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", choices=pipe_bubble.SCHEDULES, default=list(pipe_bubble.SCHEDULES))
    parser.add_argument("--microbatches", nargs="+", type=int, default=list(pipe_bubble.MICROBATCHES))
    parser.add_argument("--steps", type=int, default=8, help="measured, of each cell")
    parser.add_argument("--eager", dest="graphs", action="store_false", help="launch kernels one by one")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--smoke", action="store_true", help="a small GPT on the CPU: only to see that it runs")
    parser.add_argument("--out", type=Path, default=Path("gpu-bubble"), help="a folder, for every action of every step")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / RECORDS).unlink(missing_ok=True)
    order = {name: vars(args)[name] for name in ("schedules", "microbatches", "steps", "graphs", "smoke")}
    said = []
    for each in hear(rank_main, args.gpus, limit_s=args.limit_s, out=str(args.out), **order):
        said.append(each)
        if each["say"] == "row":
            tell(each["row"])
        else:
            print("  " + json.dumps(each), flush=True)
    rows = judged(said, len(args.schedules) * len(args.microbatches))
    args.json = args.json or args.out / "gpu_bubble.json"
    code = finish(args, "gpu bubble", rows, gpus=args.gpus)
    return 0 if args.smoke and not any("why" in row for row in rows) else code


if __name__ == "__main__":
    sys.exit(main())
