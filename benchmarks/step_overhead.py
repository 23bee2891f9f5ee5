"""What our loop and its metrics add to a step: blocks of our steps against blocks of a bare PyTorch loop's.

    .venv/bin/python benchmarks/step_overhead.py [--model vgg11] [--data digits] [--steps 10] [--rounds 9]

Both loops run in the same processes on the same batches with the same model, data and optimizer, for `single` and for
`ddp` on two ranks, in the order A B B A of blocks of steps. A ratio compares the two A with the two B of a round; the
median over rounds is printed for wall time and for CPU time (the one to trust on a shared machine), then one JSON
line. Goal: at most 1.02.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from muster.jobs.node.reports import Reporter
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import Data, open_data
from muster.jobs.train.loop import Trainer, build_trainer, run_steps
from muster.jobs.train.metrics import Files, Metrics, Summary, Units
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics.optim import build_optimizer
from muster.jobs.train.screen import Screen
from muster.jobs.world.world import World

GOAL = 1.02


class TimedMetrics(Metrics):
    """Our metrics, with the time that they take."""

    spent_s = 0.0

    def record(self, *arguments: Any, **keywords: Any) -> None:
        """Keep a step."""
        began = perf_counter()
        super().record(*arguments, **keywords)
        self.spent_s += perf_counter() - began

    def report(self) -> Summary:
        """Write what is kept."""
        began = perf_counter()
        summary = super().report()
        self.spent_s += perf_counter() - began
        return summary


class Ours:
    """Our loop, paused between blocks: its data iterator asks to be let on."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        files = Files(folder / f"metrics-{trainer.world.rank}.jsonl", folder / "metrics.jsonl")
        if trainer.world.rank:
            files = Files(files.own, None)
        self.trainer = trainer
        units = Units(trainer.data.unit, trainer.data.units_per_sample)
        self.metrics = TimedMetrics(files, trainer.world, trainer.clock, units, attempt=0, steps=1)

    def block(self, steps: int) -> None:
        """Train a block of steps, with its log points."""
        with Screen(self.trainer.world, Reporter({}), steps) as screen:
            run_steps(self.trainer, self.metrics, screen, steps)


class Bare:
    """What a user writes by hand."""

    def __init__(self, settings: TrainSettings, data: Data, world: World) -> None:
        self.data, self.world, self.each = data, world, settings.batch_size // world.size
        model = build_model(settings.model, vocabulary=data.vocabulary, seed=settings.seed)
        self.model: nn.Module = model
        if world.size > 1:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
        self.optimizer = build_optimizer(self.model.parameters(), settings.optimizer)
        self.batches = self._batches()

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = 0
        while True:
            index = torch.arange(first, first + self.each) + self.world.rank * self.each
            yield self.data.train_batch(index % self.data.train_samples, 0)
            first += self.each * self.world.size

    def block(self, steps: int) -> None:
        """Train a block of steps."""
        for _ in range(steps):
            inputs, targets = next(self.batches)
            self.optimizer.zero_grad()
            outputs = self.model(inputs)
            loss = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
            loss.backward()
            self.optimizer.step()


def measure(args: argparse.Namespace, world: World) -> tuple[list[tuple[float, float]], float]:
    """Return the ratios ours / bare of wall and of CPU time for each round, and the metrics' share of our steps."""
    settings = TrainSettings.model_validate(
        {
            "model": args.model,
            "data": args.data,
            "mode": "single" if world.size == 1 else "ddp",
            "batch_size": args.batch_size,
            "epochs": 1000,
            "evaluate": False,
            "optimizer": {"name": "sgd", "lr": 1e-3, "momentum": 0.9},
        }
    )
    data = open_data(settings)
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(build_trainer(settings, data, world), Path(folder))
        bare = Bare(settings, data, world)
        for loop in (ours, bare):
            timed(loop.block, 3, world)
        ratios, ours_s, ours.metrics.spent_s = [], 0.0, 0.0
        for _ in range(args.rounds):
            first, second, third, fourth = (timed(x.block, args.steps, world) for x in (ours, bare, bare, ours))
            wall, cpu = ((first[i] + fourth[i]) / (second[i] + third[i]) for i in range(2))
            ratios.append((wall, cpu))
            ours_s += first[0] + fourth[0]
    return ratios, ours.metrics.spent_s / ours_s


def timed(block: Callable[[int], None], steps: int, world: World) -> tuple[float, float]:
    """Return the wall and the CPU seconds of a block; ranks begin together."""
    if world.group is not None:
        dist.barrier()
    began, cpu_began = perf_counter(), process_time()
    block(steps)
    return perf_counter() - began, process_time() - cpu_began


def rank_main(args: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints the ratios."""
    torch.set_num_threads(1)
    world = World(args.rank, args.ranks, None, torch.device("cpu"))
    if args.ranks > 1:
        store = dist.TCPStore("127.0.0.1", args.port, args.ranks, args.rank == 0, timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.ranks)
        world = World(args.rank, args.ranks, dist.group.WORLD, world.device)
    talk = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the step lines are written, and read by nobody
    measured = measure(args, world)
    if args.rank == 0:
        os.write(talk, json.dumps(measured).encode())
    if args.ranks > 1:
        dist.destroy_process_group()


def start(args: argparse.Namespace, ranks: int) -> tuple[list[list[float]], float]:
    """Run the ranks of one comparison; return rank 0's ratios and share."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--ranks", str(ranks), "--port", str(port)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, env=environment)
        for rank in range(ranks)
    ]
    try:
        output = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    ratios, share = json.loads(output[0])
    return ratios, share


def main() -> None:
    """Compare both modes, print the ratios and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vgg11")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10, help="steps in a block")
    parser.add_argument("--rounds", type=int, default=9)
    for internal in ("--rank", "--ranks", "--port"):
        parser.add_argument(internal, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return
    record: dict[str, object] = {"benchmark": "step_overhead", "goal": GOAL, "model": args.model}
    for mode, ranks in (("single", 1), ("ddp", 2)):
        ratios, share = start(args, ranks)
        wall, cpu = zip(*ratios, strict=True)
        record[mode] = {
            "metrics_share": round(share, 5),
            "wall_ratio": round(statistics.median(wall), 4),
            "cpu_ratio": round(statistics.median(cpu), 4),
            "wall_ratios": [round(each, 4) for each in wall],
            "cpu_ratios": [round(each, 4) for each in cpu],
        }
        print(
            f"{mode:>6}  {ranks} rank(s)  ours / bare: wall {statistics.median(wall):.3f}  "
            f"cpu {statistics.median(cpu):.3f}  (goal {GOAL}); metrics {100 * share:.2f} % of a step (goal 1)"
        )
    print(json.dumps(record))


if __name__ == "__main__":
    main()
