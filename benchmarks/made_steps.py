"""A step of a made model against the same model of Muster's own, in every mode: what `train.model.make` costs.

    made     a module in a user's file with the layers of gpt-micro, its own forward and stages(); its forwards are
             seeded, because Muster cannot know whether they draw random numbers
    own      gpt-micro, without dropout

    ranks    two processes on the loopback, one thread each; both sides are trained in one process group, in turns.
             Where in memory a model lies makes a few percent: either side is built first in half of the repeats
    a step   read the batch, forward, backward, synchronize, step: CPU time of all ranks, wall time of the slowest

    .venv/bin/python benchmarks/made_steps.py [--modes bucketed,zero3] [--quick]

Reach: the median of the repeats' ratios is 1.00 +- 0.01, CPU and wall. Eight minutes; `--quick` two.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness import CLOCKS, Options, by_clock, clock_cells, finish, table, turns
from ranks import on_ranks, timed

STEPS = 4  # of a block
REACH = 0.01
NET = "../tests/support/made/net.py"
MODEL = {"make": f"{NET}:twin", "args": {"name": "gpt-micro"}, "context": 128}
JOB = {"data": "synthetic", "batch_size": 8, "steps": 10_000, "optimizer": {"name": "adamw", "lr": 1e-3}}


def measure(mode: str, repeats: int, first: str) -> dict[str, list[tuple[float, float]]]:
    """Build both sides, one of them `first`, and train them in turns; return the times of their blocks."""
    sides = {"made": MODEL | ({"plan": f"{NET}:gpt_plan"} if mode == "tensor" else {}), "own": "gpt-micro"}
    order = sorted(sides, key=lambda side: side != first)
    built = {side: stepper({**JOB, "mode": mode, "model": sides[side]}) for side in order}
    found = turns(built, repeats, warm_up=1)
    built.clear()
    gc.collect()  # trainers are cycles: their threads end before the group and the process do
    return found


def stepper(keys: dict[str, Any]) -> Callable[[], tuple[float, float]]:
    """Build a trainer; return what trains a block of its steps."""
    import torch
    import torch.distributed as dist

    from muster.jobs.spec.train import TrainSettings
    from muster.jobs.train.data import open_data
    from muster.jobs.train.trainer import build_trainer
    from muster.jobs.world.world import World

    settings = TrainSettings.model_validate(keys)
    world = World(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    trainer = build_trainer(settings, open_data(settings), world)
    steps, done = trainer.own_steps(), iter(range(10**9))

    def block() -> None:
        for _ in range(STEPS):
            step = next(done)
            trainer.clock.start()
            trainer.engine.train_step(step, steps[step].shards)
            trainer.clock.stop()

    return partial(timed, block)


def main() -> int:
    """Print one line a mode; return 0 if all is in reach."""
    from muster.jobs.spec.modes import MODES

    parser = Options(__doc__, repeats=24, quick={"repeats": 8})
    parser.add_argument("--modes", metavar="NAMES", help="only these, with commas")
    args = parser.parse_args()
    modes = args.modes.split(",") if args.modes else [name for name in MODES if name != "single"]
    rows = []
    for mode in modes:
        halves = [on_ranks(measure, 2, mode=mode, repeats=args.repeats // 2, first=side) for side in ("made", "own")]
        blocks = {side: [block for half in halves for block in half[side]] for side in ("made", "own")}
        found = by_clock(blocks["made"], blocks["own"], STEPS)
        far = max(abs(found[clock]["ratio"] - 1.0) for clock in CLOCKS)
        rows.append({"mode": mode, **found, "reach": REACH, "reached": far <= REACH})
    table(("mode", "CPU made / own", "wall made / own", "+- 0.01"), [
        (row["mode"], *clock_cells(row), "yes" if row["reached"] else "NO") for row in rows
    ])  # fmt: skip
    return finish(args, "made_steps", rows)


if __name__ == "__main__":
    import os

    os.chdir(Path(__file__).parent)
    sys.exit(main())
