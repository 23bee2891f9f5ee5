"""How long training stands still for an asynchronous save: ours, a plain memcpy of the same bytes, and PyTorch's DCP.

    .venv/bin/python benchmarks/save_stall.py [--megabytes 200] [--ranks 1,2] [--repeats 9]

Every rank holds a replica: weights and momenta, together so many MB. Ours saves a share of it from each rank; the
memcpy copies the same shares into buffers that were touched before, on the same ranks at the same time; DCP's
async_save is given the same state dict. Each is measured when the one before is on the disk. The stall of a save is
that of its slowest rank, and ours has in it the exchange in which the ranks agree.
Goals: 60 ms for one rank and 200 MB; at most 1.5 times the memcpy for any number of ranks.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pairs import report
from torch import nn

from muster.jobs.node.reports import Reporter
from muster.jobs.runfolder.rundir import RunDir
from muster.jobs.saving.saver import Saver, Target
from muster.jobs.saving.schedule import Schedule
from muster.jobs.spec.failover import CheckpointSettings
from muster.jobs.tensors.parts import Part
from muster.jobs.tensors.snapshot import Snapshot
from muster.jobs.train.parallel import replica as parallel
from muster.jobs.train.parallel.layers import whole_layers
from muster.jobs.train.parallel.state import Forms, ModelState
from muster.jobs.train.profiling.clock import clock_for
from muster.jobs.world.world import World

GOAL_S, GOAL_RATIO = 0.060, 1.5
WIDTH = 1024


class Replica:
    """A model after its first step, as an engine holds it."""

    def __init__(self, megabytes: int, world: World) -> None:
        layers = max(1, megabytes * 2**20 // 8 // WIDTH**2)
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        replica = parallel.Replica(self.module, world, clock_for(world.device))
        self.dealt = ModelState(replica, self.optimizer, whole_layers(Forms(self.module), world), world, {})
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def held_state(self) -> list[Part]:
        """Deal the state out, as the engine of every data-parallel mode does."""
        return self.dealt.parts()


class Ours:
    """Our saver, as the loop calls it at a step that saves."""

    def __init__(self, folder: Path, engine: Replica, world: World) -> None:
        run = RunDir(folder)
        run.attempt(0).path.mkdir(parents=True, exist_ok=True)
        settings, self.done, self.world = CheckpointSettings(every_steps=1, keep=2), 0, world
        schedule, silent = Schedule(settings, 0), Reporter({})
        self.saver = Saver(
            Target(run, 0),
            settings,
            engine.held_state,
            partial(Snapshot, device=world.device),
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


class Memcpy:
    """The limit: the same bytes into buffers that are there."""

    def __init__(self, engine: Replica) -> None:
        self.engine = engine
        self.rooms = [torch.zeros_like(part.tensor) for part in engine.held_state()]

    def save(self) -> float:
        """Copy."""
        parts = self.engine.held_state()
        began = perf_counter()
        for room, part in zip(self.rooms, parts, strict=True):
            room.copy_(part.tensor)
        return perf_counter() - began

    def settle(self) -> None:
        """Have nothing to wait for."""


class Dcp:
    """PyTorch's distributed checkpoint, asynchronous."""

    def __init__(self, folder: Path, engine: Replica) -> None:
        self.folder, self.engine, self.count, self.future = folder, engine, 0, None

    def save(self) -> float:
        """Begin a save of model and momenta; DCP leaves out what other replicas write."""
        self.count += 1
        momenta = {name: self.engine.optimizer.state[p] for name, p in self.engine.module.named_parameters()}
        state = {"model": self.engine.module.state_dict(), "optimizer": momenta}
        began = perf_counter()
        self.future = dcp.async_save(state, checkpoint_id=str(self.folder / str(self.count)))
        return perf_counter() - began

    def settle(self) -> None:
        """Wait until it is on the disk, and delete the one before."""
        if self.future is not None:
            self.future.result()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / str(self.count - 1), ignore_errors=True)


def measure(args: argparse.Namespace, world: World) -> dict[str, list[float]]:
    """Save in turn with each; return the stalls of the slowest rank."""
    engine, folder = Replica(args.megabytes, world), Path(args.folder)
    sides: dict[str, Any] = {
        "ours": Ours(folder / "run", engine, world),
        "memcpy": Memcpy(engine),
        "dcp": Dcp(folder / "dcp", engine),
    }
    stalls: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(args.repeats + 2):
        for name in sides if repeat % 2 else reversed(sides):
            dist.barrier()
            mine = torch.tensor([sides[name].save()], dtype=torch.float64)
            sides[name].settle()
            if repeat >= 2:  # the first ones start processes and touch memory
                stalls[name].append(max(each.item() for each in world.gather(mine)))
    sides["ours"].saver.close()
    return stalls


def rank_main(args: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints the stalls."""
    warnings.simplefilter("ignore")  # DCP's, about its own state
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", args.port, args.world, args.rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world)
    talk = os.dup(1)
    os.dup2(2, 1)  # each save says that it is done
    stalls = measure(args, World(args.rank, args.world, dist.group.WORLD, torch.device("cpu")))
    if args.rank == 0:
        os.write(talk, json.dumps(stalls).encode())
    dist.destroy_process_group()


def start(args: argparse.Namespace, world: int, folder: str) -> dict[str, list[float]]:
    """Run the ranks of one comparison; return rank 0's stalls."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--world", str(world), "--port", str(port), "--folder", folder]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    quiet = subprocess.DEVNULL if not args.loud else None
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=quiet, env=environment)
        for rank in range(world)
    ]
    try:
        output = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    stalls: dict[str, list[float]] = json.loads(output[0])
    return stalls


def main() -> None:
    """Compare for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="weights and momenta of a replica, MB")
    parser.add_argument("--ranks", default="1,2", help="worlds to measure, comma-separated")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--loud", action="store_true", help="show what the ranks say")
    for internal in ("--rank", "--world", "--port"):
        parser.add_argument(internal, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return
    for world in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            stalls = start(args, world, folder)
        dcp_s, ours_s = statistics.median(stalls["dcp"]), statistics.median(stalls["ours"])
        name = f"save_stall, {args.megabytes} MB, {world} rank(s), against memcpy"
        report(name, stalls["ours"], stalls["memcpy"], reach=GOAL_RATIO, ranks=world, dcp=stalls["dcp"])
        within = f"goal {1e3 * GOAL_S:.0f} ms: {'yes' if ours_s <= GOAL_S else 'NO'}"
        theirs = f"DCP async_save {1e3 * dcp_s:.1f} ms, {dcp_s / ours_s:.1f} times ours"
        print(f"  ours {1e3 * ours_s:.1f} ms ({within}); {theirs}")


if __name__ == "__main__":
    main()
