"""Communication that is exposed at the end of a backward of VGG-11, in a box of four nodes: `ddp` and `pipe`.

    exposed         from when the last rank's last gradient is ready (pipe: from the end of the last backward of all
                    ranks) until the last rank may start its optimizer: all nodes of a box have one clock

ddp: BucketedDDP where the backward takes as long as the communication. The first bucket size is held to reach.

    communication   all-reduces of all buckets, started at once, nothing beside them; of the slowest rank
    backward        alone, in no_sync(), all ranks at the same time, for they share this machine's cores; the batch is
                    chosen so that it takes as long as the communication of the bucket size that is held to reach

                                   last gradient ready        optimizer may start
    backward   ===g===g======g=====g|                         |
    buckets        -----------------|-------------------------|
                                    |<------- exposed ------->|          reach: <= 0.25 of the communication

The gradients of VGG-11's last convolutions, 27 of its 35 MB, are ready in the first third of the backward, and what is
ready last is small: whether it travels alone or with many decides.

pipe: two pipelines of two ranks side by side, which average the gradients of a slice. Reach: bucketed <= 1.00 of flat.

    flat        one all-reduce of all gradients of a slice, when its rank's row of the schedule is over
    bucketed    an all-reduce a bucket, as soon as the last micro-batch's backward has made its last gradient whole
    zero1       the same, scattered; the parameters are gathered before the next step
    alone       averages nothing, and shows what the end of a row costs by itself

Sides take turns in every repeat; a ratio is of one repeat, its median counts.

    sudo .venv/bin/python benchmarks/exposed.py [--rows ddp pipe] [--rate 1gbit] [--quick]
    .venv/bin/python benchmarks/exposed.py --ranks 4 [--quick]                              loopback

About 2 and 4 minutes; `--quick` 1 each.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from harness import Options, finish, ratio_of, spread, table, turns, verdict
from ranks import most, on_ranks, place

if TYPE_CHECKING:
    import torch

REACH = {"ddp": 0.25, "pipe": 1.0}
ALIKE = 0.15  # backward and communication, at most so far apart
MOST_SAMPLES = 64
NODES = 4
LIMIT_S = 500.0
SIDES = {"alone": {"sync": "flat"}, "flat": {"sync": "flat"}, "bucketed": {"sync": "bucketed"}, "zero1": {"zero": 1}}
JOB = {"model": "vgg11", "data": "digits", "batch_size": 64, "evaluate": False, "steps": 1}
TINY = {"model": {"layers": 2, "d_model": 16, "d_ff": 32, "heads": 2, "context": 8}, "data": "synthetic"}


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
        import torch.distributed as dist

        loss = self._loss(samples)
        dist.barrier()
        loss.backward()
        self.model.finish_gradient_synchronization()
        ready, ended = most(self.last_ready, perf_counter())
        return ended - ready

    def _loss(self, samples: int) -> "torch.Tensor":
        from ddp_models import loss_of

        self.model.zero_grad()
        return loss_of(self.model, *next(replace(self.task, samples=samples).batches(self.rank)))


def _slowest(run: Callable[[], Any]) -> float:
    import torch.distributed as dist

    dist.barrier()
    began = perf_counter()
    run()
    return most(perf_counter() - began)[0]


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


def measure_ddp(buckets: Sequence[float], repeats: int, *, samples: int | None = None, tiny: bool = False) -> Any:
    """Be one rank: return a row of times for each bucket size."""
    rows: list[dict[str, Any]] = []
    for size in buckets:
        probe = Probe(size, tiny=tiny)
        alone = statistics.median(probe.communication() for _ in range(5))
        if samples is None:
            samples = samples_for(alone, probe.backward)
        sides: dict[str, Callable[[], float]] = {
            "exposed": partial(probe.exposed, samples),
            "communication": probe.communication,
            "backward": partial(probe.backward, samples),
        }
        probe.exposed(samples)
        times = turns(sides, repeats)
        rows.append({"bucket_mb": size, "buckets": len(probe.messages), "samples": samples, **times})
        del probe, sides
    return rows


def measure_pipe(schedules: list[str], repeats: int, microbatches: int, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Be one rank: return a row of seconds by side for each schedule."""
    from muster.ddp.malloc import keep_freed_memory

    keep_freed_memory()
    return [_averaging(schedule, repeats, microbatches, {**JOB, **(TINY if tiny else {})}) for schedule in schedules]


def _averaging(schedule: str, repeats: int, microbatches: int, job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.train.data import open_data
    from muster.jobs.train.data.loading import move
    from muster.jobs.train.trainer import build_trainer
    from muster.jobs.world.world import World

    split = {"data": 2, "pipe": 2, "schedule": schedule, "microbatches": microbatches}
    sides = {name: TrainSettings.model_validate({**job, "parallel": {**split, **more}}) for name, more in SIDES.items()}
    data = open_data(sides["flat"])
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    trainers = {name: build_trainer(settings, data, world) for name, settings in sides.items()}
    trainers["alone"].engine.stages._averaging = nullcontext
    own = trainers["flat"]
    work = move(own.own_steps()[0], own.world.device, own.dtype)
    steps = {name: partial(_step, trainer, work.shards) for name, trainer in trainers.items()}
    times = turns(steps, repeats, warm_up=2)
    found = {name: dict(zip(("step", "exposed"), zip(*each, strict=True), strict=True)) for name, each in times.items()}
    return {"schedule": schedule, "microbatches": microbatches, "times": found}


def _step(trainer: Any, shards: Any) -> tuple[float, float]:
    """Train a step; return the seconds of all of it but the optimizer, and of what follows the last backward."""
    import torch.distributed as dist

    from muster.pipe.schedules.actions import Action

    engine, ended = trainer.engine, []
    engine.update = lambda: ended.append(monotonic())
    dist.barrier()
    began = monotonic()
    engine.train_step(0, shards)
    worked = max(span.end_s for span in engine.stages.pipeline.spans if isinstance(span.step, Action))
    before, last_worked, last_ended = most(-began, worked, ended[0])
    return last_ended + before, last_ended - last_worked


def judged_ddp(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row the share that is exposed, and whether it is in reach; only the first is held to it."""
    found = []
    for row in rows:
        share = statistics.median(row["backward"]) / statistics.median(row["communication"])
        judged = {**row, **ratio_of(row["exposed"], row["communication"]), "backward_share": share}
        judged |= {"row": "ddp", "held": not found, "reach": None if found else REACH["ddp"]}
        judged["reached"] = bool(found) or (judged["ratio"] <= REACH["ddp"] and abs(share - 1) <= ALIKE)
        found.append(judged)
    return found


def judged_pipe(row: dict[str, Any]) -> dict[str, Any]:
    """Add to a row its medians, and what bucketed exposes of what flat does, repeat by repeat."""
    judged = {"row": "pipe", **row, **ratio_of(*(row["times"][name]["exposed"] for name in ("bucketed", "flat")))}
    for what in ("step", "exposed"):
        judged[what] = {name: statistics.median(times[what]) for name, times in row["times"].items()}
    return {**judged, "reached": judged["ratio"] <= REACH["pipe"], "reach": REACH["pipe"]}


def show(rows: Sequence[dict[str, Any]], where: str) -> None:
    """Print a table for each kind of row."""
    ddp, pipe = ([row for row in rows if row["row"] == kind] for kind in REACH)
    if ddp:
        print(f"VGG-11, {where}, {ddp[0]['samples']} samples a rank")
        names = ("communication", "backward", "exposed")
        head = ["buckets", *names, "share of communication", "reach"]
        table(
            head, ([f"{row['buckets']} of {row['bucket_mb']:g} MB", *_medians(row, names), *_end(row)] for row in ddp)
        )
        if abs(ddp[0]["backward_share"] - 1) > ALIKE:
            print(f"the backward took {ddp[0]['backward_share']:.2f} of the communication: measure again")
    if pipe:
        print(f"VGG-11, 2 pipelines of 2 ranks, {pipe[0]['microbatches']} micro-batches, {where}: exposed")
        head = ["schedule", *SIDES, "bucketed of flat", "reach"]
        table(head, ([row["schedule"], *_medians(row["exposed"], SIDES), *_end(row)] for row in pipe))


def _medians(row: dict[str, Any], names: Any) -> list[str]:
    return [f"{statistics.median(row[name]) if isinstance(row[name], list) else row[name]:.3f} s" for name in names]


def _end(row: dict[str, Any]) -> list[str]:
    return [spread(row), verdict(row["reached"], row["reach"])]


def main() -> int:
    """Measure, compare, report."""
    note = "the first and the last bucket size, the first schedule, 3 repeats"
    parser = Options(__doc__, repeats=9, quick={"repeats": 3}, note=note)
    parser.add_argument("--rows", nargs="+", choices=REACH, default=list(REACH))
    parser.add_argument("--ranks", type=int, help="on the loopback of this machine, without a box; 4 for pipe")
    parser.add_argument("--rate", default="1gbit", help="of the box's links")
    parser.add_argument("--nodes", type=int, default=NODES, help="of the box, for ddp")
    parser.add_argument("--buckets", nargs="+", type=float, default=[25.0, 9.0, 4.0, 1.0], help="MB")
    parser.add_argument("--samples", type=int, help="a rank, instead of as many as make backward = communication")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved", "zbv"])
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    buckets, schedules = args.buckets, args.schedules
    if args.quick:
        buckets, schedules = [buckets[0], buckets[-1]], schedules[:1]
    rows: list[dict[str, Any]] = []
    if "ddp" in args.rows:
        with place(args.ranks, args.rate, args.nodes) as there:
            more = {"repeats": args.repeats, "samples": args.samples}
            rows += judged_ddp(on_ranks(measure_ddp, there, limit_s=LIMIT_S, buckets=buckets, **more))
    if "pipe" in args.rows:
        with place(args.ranks and NODES, args.rate) as there:
            more = {"repeats": args.repeats, "microbatches": args.microbatches}
            rows += map(judged_pipe, on_ranks(measure_pipe, there, limit_s=LIMIT_S, schedules=schedules, **more))
    where = "loopback" if args.ranks else f"box at {args.rate}"
    show(rows, where)
    return finish(args, "exposed", rows, where=where)


if __name__ == "__main__":
    sys.exit(main())
