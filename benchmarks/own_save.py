"""How long a user's loop stands still for a session's save, against a plain copy of the same bytes.

    .venv/bin/python benchmarks/own_save.py [--megabytes 200] [--ranks 1,4] [--repeats 9]

Every rank holds a replica: weights and momenta, together so many MB. The session saves a share of it from each rank.
Its stall is the time between two steps in which a save begins, with the exchange in which the ranks agree; the copy is
one of the same shares into memory that was touched before. They take turns, each when the save before is on the disk,
and count as their slowest rank does. Goal: at most 1.2 times the copy. The ratio of CPU time is shown beside it: on a
machine with fewer cores than ranks, the exchange waits for cores.
"""

import argparse
import statistics
import sys

from pairs import report
from rank_processes import tell, timed, under_muster

GOAL = 1.2
WIDTH = 1024
WARM_UP = 3  # saves that start processes and touch memory


def rank_main(args: argparse.Namespace) -> None:
    """Measure as a rank."""
    import torch
    import torch.distributed as dist

    import muster

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    run = muster.session()
    layers = max(1, args.megabytes * 2**20 // 8 // WIDTH**2)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = run.state(model=model, optimizer=optimizer)
    steps = run.steps(WARM_UP + args.repeats + 1, state)
    next(steps)
    optimizer.step()  # its state is there from the first save on
    parts = state.parts()
    rooms = [torch.zeros_like(part.tensor) for part in parts]

    def save() -> None:
        next(steps)

    def copy() -> None:
        for room, part in zip(rooms, parts, strict=True):
            room.copy_(part.tensor)

    times: dict[str, list[tuple[float, float]]] = {"save": [], "copy": []}
    for repeat in range(WARM_UP + args.repeats):
        for side, work in list({"save": save, "copy": copy}.items())[:: 1 if repeat % 2 else -1]:
            times[side].append(timed(work))
            run._loop.saving._wait()  # until the save is on the disk
            if side == "save" and run._loop.saving.safe != run._loop.done:
                raise SystemExit(f"step {run._loop.done} was not saved")
    if next(steps, None) is not None:
        raise SystemExit("the session's loop did not end")
    if run.is_main:
        mine = sum(part.tensor.nbytes for part in parts)
        tell({"megabytes": mine / 2**20, **{side: each[WARM_UP:] for side, each in times.items()}})
    dist.destroy_process_group()


def main() -> int:
    """Compare for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="weights and momenta of a replica, MB")
    parser.add_argument("--ranks", default="1,4", help="worlds to measure, comma-separated")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args)
        return 0
    reached = []
    for ranks in map(int, args.ranks.split(",")):
        arguments = ["--megabytes", str(args.megabytes), "--repeats", str(args.repeats)]
        found = under_muster(__file__, arguments, ranks, "checkpoint.every_steps=1")
        name = f"stall of a session's save, {args.megabytes} MB, {ranks} rank(s), against a copy of the same bytes"
        cpu, wall = ({side: [each[clock] for each in found[side]] for side in ("save", "copy")} for clock in (0, 1))
        of_cpu = statistics.median(one / other for one, other in zip(cpu["save"], cpu["copy"], strict=True))
        more = {"ranks": ranks, "share_mb": found["megabytes"], "cpu_ratio": of_cpu, "cpu": cpu}
        reached.append(report(name, wall["save"], wall["copy"], reach=GOAL, **more))
        print(f"  CPU time of all ranks: ratio {of_cpu:.3f}")
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
