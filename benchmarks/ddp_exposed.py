"""Exposed communication of BucketedDDP where the backward takes as long as the communication: VGG-11 in a box.

    communication   all-reduces of all buckets, started at once, nothing beside them; of the slowest rank
    backward        alone, in no_sync(), all ranks at the same time, for they share this machine's cores; the batch is
                    chosen so that it takes as long as the communication of the bucket size that is held to reach
    exposed         from when the last rank's last gradient is ready until the last rank may start its optimizer: all
                    nodes of a box have one clock

                                   last gradient ready        optimizer may start
    backward   ===g===g======g=====g|                         |
    buckets        -----------------|-------------------------|
                                    |<------- exposed ------->|          reach: <= 0.25 of the communication

The three take turns in every repeat; the ratio is of one repeat, its median counts. The first bucket size is held to
reach, the others stand beside it. The gradients of VGG-11's last convolutions, 27 of its 35 MB, are ready in the first
third of the backward, and what is ready last is small: whether it travels alone or with many decides.

    sudo .venv/bin/python benchmarks/ddp_exposed.py [--rate 1gbit] [--nodes 4] [--buckets 25,4] [--quick]
    .venv/bin/python benchmarks/ddp_exposed.py --ranks 2 [--quick]                              loopback

About 2 minutes; `--quick` 1.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rank_processes import in_nodes, on_loopback

if TYPE_CHECKING:
    import torch

REACH = 0.25
ALIKE = 0.15  # backward and communication, at most so far apart
MOST_SAMPLES = 64
LIMIT_S = 400.0


class Probe:
    """A wrapped VGG-11 of one rank, whose backward and communication are timed together and each alone."""

    def __init__(self, bucket_size_mb: float, *, tiny: bool) -> None:
        import torch
        import torch.distributed as dist
        from ddp_models import TASKS, TINY

        from muster.ddp import BucketedDDP

        self.task = (TINY if tiny else TASKS)["vgg11"]
        module = self.task.build()
        self.last_ready = 0.0
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._ready)  # before the wrapper's own: it copies
        self.model = BucketedDDP(module, bucket_size_mb=bucket_size_mb)
        self.rank = dist.get_rank()
        elements = {name: each.numel() for name, each in module.named_parameters()}
        self.messages = [torch.ones(sum(elements[name] for name in bucket)) for bucket in self.model.buckets]

    def _ready(self, parameter: "torch.Tensor") -> None:
        self.last_ready = perf_counter()

    def communication(self) -> float:
        """Return the seconds of all the buckets' all-reduces."""
        import torch.distributed as dist

        for message in self.messages:
            message.fill_(1.0)

        def sums() -> None:
            for work in [dist.all_reduce(message, async_op=True) for message in self.messages]:
                assert work is not None
                work.wait()

        return _slowest(sums)

    def backward(self, samples: int) -> float:
        """Return the seconds of a backward in which nothing is sent."""
        with self.model.no_sync():
            loss = self._loss(samples)
            return _slowest(loss.backward)

    def exposed(self, samples: int) -> float:
        """Return the seconds from the last gradient of all ranks to the end of the last backward."""
        import torch
        import torch.distributed as dist

        loss = self._loss(samples)
        dist.barrier()
        loss.backward()
        self.model.finish_gradient_synchronization()
        moments = torch.tensor([self.last_ready, perf_counter()], dtype=torch.float64)
        dist.all_reduce(moments, dist.ReduceOp.MAX)
        return (moments[1] - moments[0]).item()

    def _loss(self, samples: int) -> "torch.Tensor":
        from ddp_models import loss_of

        self.model.zero_grad()
        return loss_of(self.model, *next(replace(self.task, samples=samples).batches(self.rank)))


def _slowest(run: Callable[[], Any]) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = perf_counter()
    run()
    took = torch.tensor(perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def samples_for(seconds: float, backward: Callable[[int], float]) -> int:
    """Return how many samples make a backward take so long; every rank gets the same answer from the same times."""
    few, many = 2, 10
    for samples in (few, many):
        backward(samples)  # first calls choose and compile their kernels
    low, high = (statistics.median(backward(samples) for _ in range(3)) for samples in (few, many))
    each = max((high - low) / (many - few), 1e-6)
    guess = min(max(round(few + (seconds - low) / each), 1), MOST_SAMPLES)
    took = statistics.median(backward(guess) for _ in range(3))
    return min(max(round(guess * seconds / took), 1), MOST_SAMPLES)


def measure(buckets: Sequence[float], repeats: int, *, samples: int | None = None, tiny: bool = False) -> Any:
    """Be one rank, in the default process group: return a row of times for each bucket size."""
    rows: list[dict[str, Any]] = []
    for size in buckets:
        probe = Probe(size, tiny=tiny)
        alone = statistics.median(probe.communication() for _ in range(5))
        if samples is None:
            samples = samples_for(alone, probe.backward)
        times: dict[str, list[float]] = {"exposed": [], "communication": [], "backward": []}
        probe.exposed(samples)
        for _ in range(repeats):
            times["exposed"].append(probe.exposed(samples))
            times["communication"].append(probe.communication())
            times["backward"].append(probe.backward(samples))
        rows.append({"bucket_mb": size, "buckets": len(probe.messages), "samples": samples, **times})
        del probe
    return rows


def rank_main(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(args.buckets, args.repeats, samples=args.samples)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def launch(args: argparse.Namespace) -> Any:
    """Start fresh ranks, on the loopback or in a box; return what they measured."""
    arguments = ["--repeats", str(args.repeats), "--buckets", ",".join(map(str, args.buckets))]
    arguments += ["--samples", str(args.samples)] if args.samples else []
    if args.ranks:
        return on_loopback(__file__, arguments, args.ranks, LIMIT_S)
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec, parse_rate

    with box_up(BoxSpec(name=f"exposed{os.getpid()}", nodes=args.nodes, rate=parse_rate(args.rate))) as box:
        return in_nodes(box, __file__, arguments, LIMIT_S)


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its medians, the share that is exposed, and whether it is in reach; only the first is held."""
    for row in rows:
        pairs = zip(row["exposed"], row["communication"], strict=True)
        row["ratios"] = [exposed / communication for exposed, communication in pairs]
        row["ratio"] = statistics.median(row["ratios"])
        row["backward_share"] = statistics.median(row["backward"]) / statistics.median(row["communication"])
        row["held"] = row is rows[0]
        row["reached"] = row["ratio"] <= REACH and abs(row["backward_share"] - 1) <= ALIKE
    return list(rows)


def main() -> int:
    """Measure, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box")
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--buckets", type=_sizes, default=[25.0, 9.0, 4.0, 1.0], help="MB; the first is held to reach")
    parser.add_argument("--samples", type=int, help="a rank, instead of as many as make backward = communication")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="the first and the last bucket size, 3 repeats")
    args = parser.parse_args()
    if args.quick:
        args.buckets, args.repeats = [args.buckets[0], args.buckets[-1]], 3
    if args.rank:
        rank_main(args)
        return 0
    rows = judged(launch(args))
    where = f"{args.ranks} ranks, loopback" if args.ranks else f"box, {args.nodes} nodes at {args.rate}"
    print(f"VGG-11, {where}, {rows[0]['samples']} samples a rank")
    print(f"  {'buckets':>14} {'communication':>14} {'backward':>10} {'exposed':>10}   share of communication")
    for row in rows:
        times = [statistics.median(row[name]) for name in ("communication", "backward", "exposed")]
        verdict = f"; reach <= {REACH}: {'yes' if row['reached'] else 'NO'}" if row["held"] else ""
        print(
            f"  {row['buckets']:>3} of {row['bucket_mb']:>2g} MB   {times[0]:>12.3f} s {times[1]:>8.3f} s "
            f"{times[2]:>8.3f} s   {row['ratio']:.3f} ({min(row['ratios']):.3f} .. {max(row['ratios']):.3f}){verdict}"
        )
    held = rows[0]
    if abs(held["backward_share"] - 1) > ALIKE:
        print(f"the backward took {held['backward_share']:.2f} of the communication: measure again")
    print(json.dumps({"benchmark": "ddp exposed", "where": where, "reach": REACH, **held, "rows": rows}))
    return 0 if held["reached"] else 1


def _sizes(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
