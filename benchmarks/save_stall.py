"""How long training stands still for a save, against a plain copy of the same bytes.

    train      our saver as our loop calls it; beside it PyTorch's DCP, asynchronous, given the same state dict
    session    a session around a user's loop: the time between two steps in which a save begins

Every rank holds a replica: weights and momenta, together so many MB. Ours saves a share of it from each rank; the copy
is one of the same shares into buffers that were touched before, on the same ranks. Sides take turns, each when the save
before is on the disk. A stall counts as its slowest rank does. Ours has in it the exchange in which the ranks agree.
Goals: `train` 60 ms for one rank and 200 MB, and at most 1.5 times the copy for any number of ranks; `session` at most
1.2 times the copy. The ratio of CPU time is shown beside it: on a machine with fewer cores than ranks, the exchange
waits for cores.

    .venv/bin/python benchmarks/save_stall.py [train] [session] [--megabytes 200] [--ranks 1,2,4] [--repeats 9]
"""

import argparse
import contextlib
import shutil
import statistics
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from harness import Options, by_clock, compare, finish, numbers, turns, verdict
from ranks import most, on_ranks, timed, under_muster
from torch import nn

from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.saver import Saver, Target
from muster.jobs.saving.schedule import SaveSchedule
from muster.jobs.spec.failover import CheckpointSettings
from muster.jobs.tensors.parts import TensorPart
from muster.jobs.tensors.snapshot import MemorySnapshot
from muster.jobs.train.parallel.forms import Forms
from muster.jobs.train.parallel.layers import whole_layers
from muster.jobs.train.parallel.replica import Replica
from muster.jobs.train.parallel.state import ModelState
from muster.jobs.train.profiling.clock import clock_for
from muster.jobs.world.world import World

GOAL_S, GOALS = 0.060, {"train": 1.5, "session": 1.2}
WIDTH = 1024
TRAIN_WARM_UP, SESSION_WARM_UP = 2, 3  # saves that start processes and touch memory


def build(megabytes: int) -> tuple[nn.Module, torch.optim.SGD]:
    """Return a model with gradients, of so many MB with its momenta, and its optimizer before the first step."""
    torch.manual_seed(0)
    layers = max(1, megabytes * 2**20 // 8 // WIDTH**2)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


class Ours:
    """Our saver, as the loop calls it at a step that saves."""

    def __init__(self, folder: Path, state: ModelState, world: World) -> None:
        run = RunDir(folder)
        run.attempt(0).path.mkdir(parents=True, exist_ok=True)
        settings, self.done, self.world = CheckpointSettings(every_steps=1, keep=2), 0, world
        schedule, silent = SaveSchedule(settings, 0), Reporter({})
        self.saver = Saver(
            Target(run, 0),
            settings,
            state.parts,
            partial(MemorySnapshot, device=world.device),
            world,
            schedule,
            lambda done, parent, losses: {},
            silent,
        )

    def save(self) -> float:
        """Save; return the seconds that the step took longer."""
        self.done += 1
        began = perf_counter()
        note = torch.tensor(self.saver.note(self.done), dtype=torch.float64)
        self.saver.hear(self.done, [each.tolist() for each in self.world.gather(note)])
        self.saver.step_done(self.done, [])
        return perf_counter() - began

    def settle(self) -> None:
        """Wait until it is on the disk."""
        self.saver._wait()


class Copy:
    """The limit: the same bytes into buffers that are there."""

    def __init__(self, parts: list[TensorPart]) -> None:
        self.parts, self.rooms = parts, [torch.zeros_like(part.tensor) for part in parts]

    def save(self) -> float:
        """Copy."""
        began = perf_counter()
        for room, part in zip(self.rooms, self.parts, strict=True):
            room.copy_(part.tensor)
        return perf_counter() - began

    def settle(self) -> None:
        """Have nothing to wait for."""


class Dcp:
    """PyTorch's distributed checkpoint, asynchronous."""

    def __init__(self, folder: Path, module: nn.Module, optimizer: torch.optim.SGD) -> None:
        self.folder, self.module, self.optimizer, self.count = folder, module, optimizer, 0
        self.future: Any = None

    def save(self) -> float:
        """Begin a save of model and momenta; DCP leaves out what other replicas write."""
        import torch.distributed.checkpoint as dcp

        self.count += 1
        momenta = {name: self.optimizer.state[parameter] for name, parameter in self.module.named_parameters()}
        state = {"model": self.module.state_dict(), "optimizer": momenta}
        began = perf_counter()
        self.future = dcp.async_save(state, checkpoint_id=str(self.folder / str(self.count)))
        return perf_counter() - began

    def settle(self) -> None:
        """Wait until it is on the disk, and delete the one before."""
        self.future.result()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / str(self.count - 1), ignore_errors=True)


def measure_train(megabytes: int, repeats: int, folder: str) -> dict[str, list[float]]:
    """Save in turn with each as a rank; return the stalls of the slowest rank."""
    warnings.simplefilter("ignore")  # DCP's, about its own state
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    module, optimizer = build(megabytes)
    replica = Replica(module, world, clock_for(world.device))
    state = ModelState(replica, optimizer, whole_layers(Forms(module), world), world, {})
    optimizer.step()
    ours = Ours(Path(folder) / "run", state, world)
    sides = {"ours": ours, "copy": Copy(state.parts()), "dcp": Dcp(Path(folder) / "dcp", module, optimizer)}

    def stall(side: Any) -> float:
        dist.barrier()
        mine = side.save()
        side.settle()
        return most(mine)[0]

    with contextlib.redirect_stdout(sys.stderr):  # each save says that it is done
        stalls = turns({name: partial(stall, side) for name, side in sides.items()}, repeats, warm_up=TRAIN_WARM_UP)
        ours.saver.close()
    return stalls


def measure_session(megabytes: int, repeats: int) -> dict[str, Any]:
    """Measure a session's saves and copies as a rank."""
    import muster

    run = muster.session()
    module, optimizer = build(megabytes)
    state = run.state(model=module, optimizer=optimizer)
    steps = run.steps(SESSION_WARM_UP + repeats + 1, state)
    next(steps)
    optimizer.step()  # its state is there from the first save on
    copy = Copy(state.parts())

    def save() -> tuple[float, float]:
        found = timed(lambda: next(steps))
        run._loop.saving._wait()  # until the save is on the disk
        if run._loop.saving.safe != run._loop.done:
            raise SystemExit(f"step {run._loop.done} was not saved")
        return found

    times = turns({"ours": save, "copy": lambda: timed(copy.save)}, repeats, warm_up=SESSION_WARM_UP)
    if next(steps, None) is not None:
        raise SystemExit("the session's loop did not end")
    return {"share_mb": sum(part.tensor.nbytes for part in copy.parts) / 2**20, **times}


def train_row(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Compare our loop's saver with a copy and with DCP."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = str(Path(folder).resolve())
        stalls = on_ranks(measure_train, ranks, megabytes=args.megabytes, repeats=args.repeats, folder=path)
    name = f"stall of a save, {args.megabytes} MB, {ranks} rank(s), against a copy of the same bytes"
    row = compare(name, stalls["ours"], stalls["copy"], reach=GOALS["train"], ranks=ranks, dcp=stalls["dcp"])
    ours_s, dcp_s = statistics.median(stalls["ours"]), statistics.median(stalls["dcp"])
    within = ours_s <= GOAL_S
    print(f"  ours {1e3 * ours_s:.1f} ms (goal in s {verdict(within, GOAL_S)}); ", end="")
    print(f"DCP async_save {1e3 * dcp_s:.1f} ms, {dcp_s / ours_s:.1f} times ours")
    return row | {"within_goal_s": within}


def session_row(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Compare a session's save with a copy."""
    settings = {"megabytes": args.megabytes, "repeats": args.repeats}
    found = under_muster(measure_session, ranks, "checkpoint.every_steps=1", "start_timeout_s=600", **settings)
    name = f"stall of a session's save, {args.megabytes} MB, {ranks} rank(s), against a copy of the same bytes"
    by = by_clock(found["ours"], found["copy"])
    more = {"ranks": ranks, "share_mb": found["share_mb"], "cpu": by["cpu"]}
    row = compare(name, by["wall"]["ours"], by["wall"]["theirs"], reach=GOALS["session"], **more)
    print(f"  CPU time of all ranks: ratio {by['cpu']['ratio']:.3f}")
    return row


def main() -> int:
    """Compare for each number of ranks."""
    parser = Options(__doc__, repeats=9, quick={"repeats": 1, "megabytes": 8})
    parser.add_argument("what", nargs="*", choices=[*GOALS, "all"], default="all", help="rows, by default both")
    parser.add_argument("--megabytes", type=int, default=200, help="weights and momenta of a replica, MB")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4], help="worlds to measure, comma-separated")
    args = parser.parse_args()
    rows = []
    for what, row in (("train", train_row), ("session", session_row)):
        if what in args.what or "all" in args.what:
            rows += [row(ranks, args) for ranks in args.ranks]
    return finish(args, "save_stall", rows)


if __name__ == "__main__":
    sys.exit(main())
