"""Collectives in a box of four nodes at 1 Gbit/s, against what the links allow: how honest its links are.

    all-reduce   ring bound        2(n-1)/n * S / B      every link carries that much, each way
    gather       receiver's link   (n-1) * S / B         all that the others have goes through one link

S is 25 MB = 25 * 10^6 bytes a rank, B is 10^9 bits a second. TCP, IP and Ethernet take 66 of every 1514 bytes, so
1.046 is the least that can be reached. PyTorch's own gloo does the work; the slowest rank's time counts.

    sudo .venv/bin/python benchmarks/box_links.py [--rate 1gbit] [--nodes 4] [--repeats 15]
"""

import argparse
import json
import os
import sys
import time
from typing import Any

from pairs import report
from rank_processes import in_nodes

REACH = 1.10
BYTES = 25_000_000
WIRE = 1514 / 1448  # bytes on the wire for each byte of a full TCP segment with time stamps
LIMIT_S = 300


def rank_main(repeats: int) -> None:
    """Be one rank: time both collectives; rank 0 prints the slowest rank's times."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = torch.ones(BYTES // 4)
    gathered = [torch.empty_like(numbers) for _ in range(size)] if rank == 0 else None

    def all_reduce() -> None:
        dist.all_reduce(numbers)

    def gather() -> None:
        dist.gather(numbers, gathered, dst=0)

    times = {}
    for name, operation in (("all_reduce", all_reduce), ("gather", gather)):
        measured = []
        for repeat in range(-2, repeats):
            dist.barrier()
            started = time.perf_counter()
            operation()
            took = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            numbers.fill_(1.0)
            if repeat >= 0:
                measured.append(took.item())
        times[name] = measured
    if rank == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def measure(nodes: int, rate: int, repeats: int) -> Any:
    """Boot a box, start a rank in each node, and return the times of both collectives."""
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec

    with box_up(BoxSpec(name=f"links{os.getpid()}", nodes=nodes, rate=rate)) as box:
        return in_nodes(box, __file__, ["--repeats", str(repeats)], LIMIT_S)


def main() -> int:
    """Measure, compare with the bounds, report."""
    from muster.cloudlab.box.spec import parse_rate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.repeats)
        return 0
    rate, nodes = parse_rate(args.rate), args.nodes
    if rate is None:
        parser.error("--rate none has no bound")
    one_s = BYTES * 8 / rate
    bounds = {"all_reduce": 2 * (nodes - 1) / nodes * one_s, "gather": (nodes - 1) * one_s}
    reached = []
    for name, times in measure(nodes, rate, args.repeats).items():
        bound_s = bounds[name]
        title = f"box {name}, {nodes} nodes at {args.rate}, {BYTES / 1e6:g} MB, against its bound"
        within = report(title, times, [bound_s] * len(times), reach=REACH, bytes=BYTES, bound_s=bound_s, wire=WIRE)
        honest = min(times) >= bound_s  # faster than the links would mean that they are not shaped
        reached.append(within and honest)
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
