"""What Muster adds to a training step: blocks of steps with it against blocks of a bare PyTorch loop's.

    single, ddp        our loop and its metrics (`train:`), one rank and DDP on two, against a loop as a user writes it,
                       on the same batches with the same model, data and optimizer
    vgg11, gpt-5ms     a session around a user's DDP loop, 2 ranks under `muster run`: model, optimizer and sampler
                       registered, loss and tokens logged, the ranks meet; no save is due. `again` is the bare loop once
                       more: what its ratio differs from 1 by is noise

Sides take turns in the same processes, A B B A or A B C C B A. CPU time is the one to trust on a shared machine, and
held to reach: at most 1.02 of the bare loop's; of a session 1.01 for VGG-11, and 1.05 for a GPT with steps of about
5 ms. What a save costs is measured by save_stall.py.

    .venv/bin/python benchmarks/step_overhead.py [single ddp vgg11 gpt-5ms] [--repeats 15] [--json FILE]
"""

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from ddp_models import TASKS, TINY, Task
from harness import Options, by_clock, compare, finish, ratio_of, turns
from ranks import on_ranks, timed, under_muster
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from muster.jobs.models.shapes import GptShape
from muster.jobs.node.reports import Reporter
from muster.jobs.spec.train import TrainSettings
from muster.jobs.train.data import Data, open_data
from muster.jobs.train.loop import run_steps
from muster.jobs.train.metrics import Files, LogSummary, Metrics, Units
from muster.jobs.train.models import build_model
from muster.jobs.train.numerics.optim import build_optimizer
from muster.jobs.train.screen import Screen
from muster.jobs.train.trainer import Trainer, build_trainer
from muster.jobs.world.world import World

Times = dict[str, list[tuple[float, float]]]
GOALS = {"single": 1.02, "ddp": 1.02, "vgg11": 1.01, "gpt-5ms": 1.05}
STEPS = {"single": 10, "ddp": 10, "vgg11": 12, "gpt-5ms": 300}  # of a block: the ranks of a session meet in each
GPT_5MS = Task(GptShape("gpt-5ms", 64, 256, 2, 4, context=32), 2)
LOOP_WARM_UP, SESSION_WARM_UP = 1, 2  # blocks of each side


class TimedMetrics(Metrics):
    """Our metrics, with the time that it takes to keep a step and to write what is kept."""

    spent_s = 0.0

    def record(self, *arguments: Any, **keywords: Any) -> None:
        began = perf_counter()
        super().record(*arguments, **keywords)
        self.spent_s += perf_counter() - began

    def report(self, *arguments: Any) -> LogSummary:
        began = perf_counter()
        summary = super().report(*arguments)
        self.spent_s += perf_counter() - began
        return summary


class Ours:
    """Our loop, paused between blocks: its data iterator asks to be let on."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        own = folder / f"metrics-{trainer.world.rank}.jsonl"
        files = Files(own, None if trainer.world.rank else folder / "metrics.jsonl")
        self.trainer = trainer
        units = Units(trainer.data.unit, trainer.data.units_per_sample)
        self.metrics = TimedMetrics(files, trainer.world, trainer.clock, units, attempt=0, steps=1)

    def block(self, steps: int) -> None:
        """Train a block of steps, with its log points."""
        with Screen(self.trainer.world, Reporter({}), steps) as screen:
            run_steps(self.trainer, self.metrics, screen, steps)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], tuple[torch.Tensor, int]]:
    """Return what a user writes by hand: a step, which returns its loss and how many samples or tokens it took."""

    def step() -> tuple[torch.Tensor, int]:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach(), targets.numel()

    return step


def bare_step(settings: TrainSettings, data: Data, world: World) -> Callable[[], object]:
    """Return a step by hand on the batches of our loop."""

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        each = settings.batch_size // world.size
        for first in itertools.count(world.rank * each, settings.batch_size):
            yield data.train_batch(torch.arange(first, first + each) % data.train_samples, 0)

    model: nn.Module = build_model(settings.model, vocabulary=data.vocabulary, seed=settings.seed)
    if world.size > 1:
        model = distributed(model)
    return step_of(model, build_optimizer(model.parameters(), settings.optimizer), batches())


def distributed(model: nn.Module) -> nn.Module:
    """Return PyTorch's DDP of a model, as our modes have it."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)


def block_of(step: Callable[[], object], steps: int) -> Callable[[], tuple[float, float]]:
    """Return the measurement of a block of steps."""
    return lambda: timed(lambda: [step() for _ in range(steps)])


def measure_loop(steps: int, repeats: int, **train: Any) -> tuple[Times, float]:
    """Measure as a rank our loop and the bare one; return their times and the metrics' share of our steps."""
    size = dist.get_world_size()
    world = World(dist.get_rank(), size, dist.group.WORLD if size > 1 else None, torch.device("cpu"))
    optimizer = {"name": "sgd", "lr": 1e-3, "momentum": 0.9}
    more = {"mode": "ddp" if size > 1 else "single", "epochs": 1000, "evaluate": False, "optimizer": optimizer}
    settings = TrainSettings.model_validate(train | more)
    data = open_data(settings)
    # The step lines are written, and read by nobody.
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null):
        ours = Ours(build_trainer(settings, data, world), Path(folder))
        bare = block_of(bare_step(settings, data, world), steps)
        blocks = {"ours": lambda: timed(lambda: ours.block(steps)), "bare": bare}
        turns(blocks, LOOP_WARM_UP)
        ours.metrics.spent_s = 0.0
        times = turns(blocks, repeats)
    return times, ours.metrics.spent_s / sum(wall for _, wall in times["ours"])


def measure_session(name: str, steps: int, repeats: int, tiny: bool) -> Times:
    """Measure as a rank a session around a loop, and the loop without it, twice."""
    import muster

    run = muster.session()
    task = {**(TINY if tiny else TASKS), "gpt-5ms": GPT_5MS}[name]
    model = distributed(task.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    held = itertools.cycle(list(itertools.islice(task.batches(run.rank), 8)))  # so that no side waits for data
    step = step_of(model, optimizer, held)
    state = run.state(model=model, optimizer=optimizer, sampler=run.sampler(1_000_000, 8), best=0.0)
    total = (SESSION_WARM_UP + repeats) * steps
    session_steps: Iterator[int] = run.steps(total, state)

    def session_step() -> None:
        next(session_steps)
        loss, amount = step()
        run.log(loss=loss, tokens=amount)

    sides = {"session": session_step, "bare": step, "again": step}
    blocks = {side: block_of(each, steps) for side, each in sides.items()}
    times = turns(blocks, repeats, warm_up=SESSION_WARM_UP)
    if next(session_steps, None) is not None:
        raise SystemExit(f"the session's loop did not end after {total} steps")
    return times


def loop_row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compare our loop with a bare one."""
    ranks, steps = 1 if name == "single" else 2, args.steps or STEPS[name]
    train = {"model": args.model, "data": args.data, "batch_size": args.batch_size}
    times, share = on_ranks(measure_loop, ranks, steps=steps, repeats=args.repeats, **train)
    title = f"{name}: our loop, {args.model}, {ranks} rank(s)"
    return row_of(title, times["ours"], times["bare"], steps, GOALS[name], metrics_share=share)


def session_row(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compare a session around a DDP loop with the loop."""
    steps = args.steps or STEPS[name]
    settings = {"name": name, "steps": steps, "repeats": args.repeats, "tiny": args.tiny}
    job = ("checkpoint.every_steps=1000000000", "start_timeout_s=600")
    times = under_muster(measure_session, 2, *job, **settings)
    noise = ratio_of([cpu for cpu, _ in times["again"]], [cpu for cpu, _ in times["bare"]])["ratio"]
    title = f"{name}: a session around a DDP loop, 2 ranks"
    return row_of(title, times["session"], times["bare"], steps, GOALS[name], bare_again=noise)


def row_of(title: str, ours: Any, bare: Any, steps: int, goal: float, **more: float) -> dict[str, Any]:
    """Print and return a row, held to its goal by CPU time."""
    found = by_clock(ours, bare, steps)
    cpu, wall = found["cpu"], found["wall"]
    more |= {"wall_ratio": wall["ratio"], "wall_s": statistics.median(wall["theirs"])}
    row = compare(f"{title}, CPU time of a step", cpu["ours"], cpu["theirs"], reach=goal, steps=steps, **more)
    print(", ".join(f"{name} {value:.4f}" for name, value in more.items()))
    return row


def main() -> int:
    """Measure every row that was asked for."""
    parser = Options(__doc__, repeats=15, quick={"repeats": 3})
    parser.add_argument("what", nargs="*", choices=[*GOALS, "all"], default="all", help="rows, by default all")
    parser.add_argument("--model", default="vgg11", help="of our loop")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=0, help="steps of a block")
    parser.add_argument("--tiny", action="store_true", help="a smaller VGG in the session, to try the script")
    args = parser.parse_args()
    rows = []
    for name in GOALS if "all" in args.what else args.what:
        rows.append((loop_row if name in ("single", "ddp") else session_row)(name, args))
    return finish(args, "step_overhead", rows)


if __name__ == "__main__":
    sys.exit(main())
