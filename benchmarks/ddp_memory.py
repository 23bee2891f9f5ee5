"""Peak memory of a rank with BucketedDDP against torch's DistributedDataParallel(gradient_as_bucket_view=True), CPU.

    launch    fresh ranks on the loopback train a few steps with one of the two; launches take turns, A B B A
    growth    the peak of the resident set (VmHWM, set back first) less what stood before the model was wrapped:
              buckets, gradients, optimizer states, activations, and what gloo takes. The mean of the ranks. A tiny
              model was trained before, so that the libraries' own pages are there
    peak      the whole: libraries and the model too

VGG-11 and a GPT of 5 M parameters (benchmarks/ddp_models.py, four times its batches), AdamW. torch's buckets are made
anew in its second step.

    .venv/bin/python benchmarks/ddp_memory.py [--ranks 2] [--repeats 5] [--quick]

Reach: growth <= 1.00, the median of the launches' ratios. About 2 minutes; `--quick` 1. Linux only.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pairs import interleaved, report
from rank_processes import on_loopback

if TYPE_CHECKING:
    from ddp_models import Loop

REACH = 1.00
STEPS = 4
BATCHES = 4  # of ddp_models'
LIMIT_S = 120.0
MODELS = ("vgg11", "gpt-5m")
MB = 2**20


def measure(model: str, side: str, *, tiny: bool = False) -> dict[str, float]:
    """Be one rank, in the default process group: return the mean bytes of all ranks."""
    import torch
    import torch.distributed as dist
    from ddp_models import TASKS, TINY, Loop

    rank = dist.get_rank()
    _train(Loop(TINY[model].build(), side, TINY[model].batches(rank)))
    task = (TINY if tiny else TASKS)[model]
    task = replace(task, samples=BATCHES * task.samples)
    module = task.build()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    _train(Loop(module, side, task.batches(rank)))
    peak = _status("VmHWM")
    found = torch.tensor([peak - before, peak], dtype=torch.float64)
    dist.all_reduce(found)
    growth, whole = (found / dist.get_world_size()).tolist()
    return {"growth": growth, "peak": whole}


def _train(loop: "Loop") -> None:
    for _ in range(STEPS):
        loop.step()


def _status(key: str) -> int:
    """Return a size of /proc/self/status in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024


def rank_main(model: str, side: str) -> None:
    """Be one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))  # threads and connections are there before anything counts
    found = measure(model, side)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def compare(model: str, args: argparse.Namespace) -> bool:
    """Launch both sides in turn, report."""
    peaks: dict[str, list[float]] = {"ours": [], "torch": []}

    def launch(side: str) -> float:
        found = on_loopback(__file__, ["--model", model, "--side", side], args.ranks, LIMIT_S)
        peaks[side].append(found["peak"] / MB)
        return float(found["growth"]) / MB

    mine, theirs = interleaved(lambda: launch("ours"), lambda: launch("torch"), args.repeats)
    whole = {side: statistics.median(each) for side, each in peaks.items()}
    title = f"peak memory, {model}, {args.ranks} ranks"
    within = report(title, mine, theirs, reach=REACH, unit="MB", peak_mb=whole)
    print(f"  with libraries and model: ours {whole['ours']:.1f} MB, theirs {whole['torch']:.1f} MB")
    return within


def main() -> int:
    """Measure, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=("ours", "torch"), help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=MODELS, help="one alone")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 launches of each")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 2
    if args.rank:
        rank_main(args.model, args.side)
        return 0
    reached = [compare(model, args) for model in ([args.model] if args.model else MODELS)]
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
