"""The bubble of a pipeline's step as measured, beside the simulated one with the measured mean costs.

    sleep   a rank in each of the four nodes of a box, messages of 128 KB over links of 1 Gbit/s: a stage sleeps what
            its forward, input gradient and weight gradient are to cost, 20 ms each (half of it where a rank has two
            stages), so that ranks do not compete for cores
    real    two ranks on the loopback, one thread each, with the blocks of a GPT (d256 of benchmarks/pipe_sides.py, one
            sample a micro-batch); after a step they rest as long as it took
    bubble  share of the ranks' time, from the first start to the last end of any action, in which a rank does none.
            Ranks begin a step together; clocks are compared by pings before (`pipe/timeline.py`)
    beside  the simulator, with the means of what actions took in the same step, and the medians of what messages took,
            and of what it cost their two ranks to handle them; and the formula, of stages alike, F = I = W, and
            messages free. Medians of the steps, of the points too

    sudo .venv/bin/python benchmarks/pipe_bubble.py [--rate 1gbit] [--steps 7] [--quick] [--draw FOLDER]
    .venv/bin/python benchmarks/pipe_bubble.py --ranks 4 [--work sleep]     loopback: ranks sleep there as well

What a step's means cannot say is kept out of it, where it is none of the pipeline's: ranks have real-time priority if
the system allows it (root), and steps in which one was ready and had no core are measured again; nodes use the oldest
of TCP's congestion controls, for with BBR, many a machine's default, some messages of 128 KB lie 20 to 110 ms.

Reach: at most 3 points between measured and simulated, for every schedule and 4, 8 and 16 micro-batches. About 4
minutes; `--quick` one: 3 steps, and no 16 micro-batches. `--draw` leaves a drawing of every step measured last.
"""

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Options, finish, table
from ranks import on_ranks, place
from torch import Tensor, nn

LIMIT_S = 580.0
REACH_POINTS = 3.0
WORKS = {"sleep": 4, "real": 2}  # ranks
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb1p", "zbv", "terapipe")
MICROBATCHES = (4, 8, 16)
ACTION_S = 0.020  # each of F, I and W, of all stages of a rank
MESSAGE_SHAPE = (4, 64, 128)  # of a micro-batch, in float32: 128 KB
SAMPLES = 1  # of a micro-batch of real work
WARM_UP = 2  # steps
QUIET = 0.03  # share of a step in which ranks may be ready and have no core
MOST = 3  # times as many steps as are wanted
CONGESTION = "reno"  # there is no loss here


class Sleeping(nn.Module):
    """A layer that computes nothing and takes its time, whatever asks for its gradients and when."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(()))
        self.keep: Callable[[Callable[[], None]], None] | None = None  # of a zero bubble's queue

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(x, self.weight, self)
        return output


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Sleeping) -> Tensor:
        ctx.layer = layer
        time.sleep(layer.seconds)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        layer: Sleeping = ctx.layer
        time.sleep(layer.seconds)
        if layer.keep is not None:
            layer.keep(lambda: time.sleep(layer.seconds))
        else:
            time.sleep(layer.seconds)
        return gradients[0].clone(), gradients[0].sum(), None


def pipeline_of(work: str, name: str, microbatches: int, scale: float = 1.0) -> tuple[Any, tuple[Tensor, Tensor]]:
    """Build a pipeline over the default group, and a batch for it; `scale` shortens what sleeps."""
    from pipe_sides import TASKS, OurSide

    from muster.pipe.pipeline import Pipeline

    if work == "real":
        task = replace(TASKS["d256"], samples=SAMPLES)
        return OurSide(name, task.layers(), microbatches).pipeline, next(task.batches(microbatches))
    table = table_of(name, dist.get_world_size(), microbatches)
    seconds = scale * ACTION_S * dist.get_world_size() / table.stages
    layers = nn.Sequential(*(Sleeping(seconds) for _ in range(table.stages)))
    tokens = (MESSAGE_SHAPE[1] // table.slices,) * table.slices if table.slices > 1 else ()
    pipeline = Pipeline(layers, table, loss=lambda output, target: (output - target).mean(), tokens=tokens)
    if pipeline.queue is not None:
        for layer in pipeline.module.children():
            assert isinstance(layer, Sleeping)
            layer.keep = pipeline.queue.keep
    batch = torch.zeros(microbatches // table.slices * MESSAGE_SHAPE[0], *MESSAGE_SHAPE[1:])
    return pipeline, (batch, batch)


def table_of(name: str, ranks: int, microbatches: int) -> Any:
    """Return the schedule's table; terapipe has one micro-batch of as many slices as others have micro-batches."""
    from pipe_sides import CHUNKS

    from muster.pipe.schedules.tables import schedule

    slices = microbatches if name == "terapipe" else 1
    return schedule(name, ranks, microbatches // slices, chunks=CHUNKS.get(name, 1), slices=slices)


def measure_all(work: str, schedules: Sequence[str], microbatches: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """Be one rank: measure every cell."""
    return [measure(work, name, each, steps) for name, each in itertools.product(schedules, microbatches)]


def measure(work: str, name: str, microbatches: int, steps: int, scale: float = 1.0) -> dict[str, Any]:
    """Be one rank, in the default process group: return on rank 0 what a schedule's steps recorded, step by step.

    Steps go on until so many were quiet, but not for ever; the quietest ones are returned, in their order.
    """
    from muster.pipe.timeline import clock_offsets, gather

    pipeline, batch = pipeline_of(work, name, microbatches, scale)
    if os.sched_getscheduler(0) == os.SCHED_RR:
        pipeline._marks.now = yielding  # between actions
    offsets = clock_offsets()
    records: list[tuple[float, list[Any]]] = []
    quiet = 0
    for step in range(WARM_UP + MOST * steps):
        dist.barrier()
        began_s, waited_s = time.monotonic(), waited_for_core_s()
        pipeline.step(*batch)
        took = torch.tensor([time.monotonic() - began_s, waited_for_core_s() - waited_s])
        if work == "real":
            time.sleep(took[0].item())  # others have their turn
        dist.all_reduce(took)
        found = gather(pipeline.spans, None, offsets)
        if step < WARM_UP:
            continue
        waited = (took[1] / took[0]).item()
        if found is not None:
            records.append((waited, [list(each.as_dict().values()) for each in found]))
        quiet += waited <= QUIET
        if quiet == steps:
            break
    counted = sorted(sorted(range(len(records)), key=lambda index: records[index][0])[:steps])
    return {
        "schedule": name,
        "microbatches": microbatches,
        "uncertainty_s": max(each.uncertainty_s for each in offsets),
        "waited": [records[index][0] for index in counted],
        "steps": [records[index][1] for index in counted],
    }


def yielding() -> float:
    """Let gloo's thread have its turn, which does not interrupt one of its own real-time priority; return the time."""
    os.sched_yield()
    return time.monotonic()


def waited_for_core_s() -> float:
    """Return how long this thread was ready and had no core, in seconds; 0 where nothing tells."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return 0.0


def undisturbed() -> None:
    """Keep other work on this machine from delaying this rank and the threads that it will have, where that is allowed.

    All have one priority, so that none that waits for another's lock keeps it from its core.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def row_of(work: str, table: Any, found: dict[str, Any], steps: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Set what was measured in steps of a schedule's table, as records, beside the simulation."""
    from muster.pipe.schedules.measured import compare
    from muster.pipe.schedules.simulate import bubble_formula

    each = [compare([step], table) for step in steps]
    points = [100 * (both.measured - both.simulated) for both in each]
    messages = [seconds for both in each for seconds in both.costs.message]  # type: ignore[union-attr]
    middle = each[sorted(range(len(each)), key=points.__getitem__)[len(each) // 2]]
    return {
        "work": work,
        "ranks": table.ranks,
        "schedule": table.name,
        "microbatches": table.microbatches,
        "measured": statistics.median(both.measured for both in each),
        "simulated": statistics.median(both.simulated for both in each),
        "formula": bubble_formula(table.name, table.ranks, table.microbatches, table.stages // table.ranks),
        "points": statistics.median(points),
        "steps": points,
        "step_s": statistics.median(max(record.end_s for record in step) for step in steps),
        "simulated_s": statistics.median(both.simulation.makespan_s for both in each),
        "message_s": statistics.median(messages) if messages else 0.0,
        "costs": vars(middle.costs),  # of the step in the middle
        "clock_s": found["uncertainty_s"],
        "reached": abs(statistics.median(points)) <= REACH_POINTS,
    }


def row_from(work: str, ranks: int, found: dict[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Make a row of what rank 0 printed of a cell; leave a drawing of its last step in a folder."""
    from muster.pipe.schedules.measured import Record

    name, microbatches = found["schedule"], found["microbatches"]
    table = table_of(name, ranks, microbatches)
    steps = [[Record(*each) for each in step] for step in found["steps"]]
    if folder is not None:
        draw(folder / f"{work}-{name}-{microbatches}.svg", f"{name}, {ranks} ranks", steps[-1], table.rank_of)
    return {**row_of(work, table, found, steps), "waited": found.get("waited")}


def draw(path: Path, title: str, records: Sequence[Any], rank_of: Sequence[int]) -> None:
    """Leave a drawing of a measured step."""
    from muster.pipe.schedules.measured import bars
    from muster.pipe.schedules.svg import svg

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(bars(records, rank_of), title=title, unit="ms"), encoding="utf-8")


def launch(work: str, args: Any) -> tuple[int, list[dict[str, Any]]]:
    """Start fresh ranks, in the nodes of a box or on the loopback; return how many, and what they measured."""
    ranks = args.ranks or WORKS[work]
    with place(ranks if args.ranks or work == "real" else None, args.rate, ranks) as there:
        for node in () if isinstance(there, int) else there.state.spec.compute:
            setting = f"net.ipv4.tcp_congestion_control={CONGESTION}"
            subprocess.run(there.exec_argv(node, ["sysctl", "-qw", setting]), check=True)
        cells = {"schedules": args.schedules, "microbatches": args.microbatches, "steps": args.steps}
        return ranks, on_ranks(measure_all, there, limit_s=LIMIT_S, before="undisturbed", work=work, **cells)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    lines = []
    for row in rows:
        shares = [f"{100 * row[key]:.1f} %" for key in ("measured", "simulated", "formula")]
        verdict = f"<= {REACH_POINTS:.0f}: {'yes' if row['reached'] else 'NO'}"
        named = [row["work"], f"{row['ranks']} ranks", row["schedule"], f"m {row['microbatches']}"]
        lines.append([*named, *shares, f"{row['points']:+.2f}", f"{1e3 * row['message_s']:.2f} ms", verdict])
    table(["", "", "", "", "measured", "simulated", "formula", "points", "message", "reach"], lines)


def main() -> int:
    """Measure, compare with the simulator, report."""
    parser = Options(__doc__, quick={"steps": 3, "microbatches": [4, 8]})
    parser.add_argument("--work", choices=WORKS, help="default: both")
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box")
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--microbatches", nargs="+", type=int, default=list(MICROBATCHES))
    parser.add_argument("--steps", type=int, default=7, help="quiet ones; three times as many at most")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="leave drawings there")
    args = parser.parse_args()
    rows = []
    for work in [args.work] if args.work else WORKS:
        if work == "real":  # its blocks know nothing of slices
            args.schedules = [each for each in args.schedules if each != "terapipe"]
        ranks, found = launch(work, args)
        rows += [row_from(work, ranks, each, args.draw) for each in found]
    show(rows)
    return finish(args, "pipe bubble", rows, reach_points=REACH_POINTS)


if __name__ == "__main__":
    sys.exit(main())
