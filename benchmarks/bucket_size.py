"""The bucket size that the cost model chooses, against the best of a sweep: 64 MB of gradients, bucketed all-reduces.

    fit          single async all-reduces of seven sizes in this launch, fitted as `muster bench fit` does
    measured     a backward in 64 equal parts; each bucket is all-reduced, async, when its last part is ready
    backward     `sleep`: 50 ms, then 150 ms, in which the cores are free; `work`: as much of real matrix products
    stored       the choice of this launch from the fit of an earlier one, with fresh processes

Regret is how much slower the chosen size is than the best of the seven, by their measured medians over rounds in which
the sizes take turns. Reach: 3 % with the fit of the same launch, 10 % with a stored one, under both kinds of backward.
What a collective beside a backward takes from its cores is not in the model: with `work` on this machine that shows.

    .venv/bin/python benchmarks/bucket_size.py [--rounds 9] [--launches 4] [--quick]       two ranks on this machine
    sudo .venv/bin/python benchmarks/bucket_size.py --box 1gbit                            four nodes of a box
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rank_processes import in_nodes, on_loopback

from muster.collectives_bench.cost import buckets, curves, heldout
from muster.collectives_bench.cost.buckets import MB, Lanes

TOTAL, PARTS = 64 * MB, 64
SINGLES = 20
SIZES = tuple(count * MB for count in (1, 2, 4, 8, 16, 32, 64))
BACKWARDS = {"sleep 50": ("sleep", 0.05), "sleep 150": ("sleep", 0.15), "work": ("work", 0.15)}
IN_BOX = {"sleep 500": ("sleep", 0.5), "sleep 1500": ("sleep", 1.5), "work": ("work", 0.5)}  # the network takes 0.8 s
REACH = {"same launch": 0.03, "stored": 0.10}
LIMIT_S = 900


def rank_main(rounds: int, backwards: dict[str, Sequence[Any]]) -> None:
    """Be one rank: measure single all-reduces, then every size under every backward; rank 0 prints it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gradients = torch.ones(TOTAL // 4)

    def slowest(run: Callable[[], None]) -> float:
        dist.barrier()
        began = time.perf_counter()
        run()
        took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    def single(size: int) -> None:
        work = dist.all_reduce(gradients[: size // 4], async_op=True)
        assert work is not None
        work.wait()

    def step(size: int, part: Callable[[], None]) -> None:
        works, each = [], TOTAL // PARTS
        for number in range(1, PARTS + 1):
            part()
            if number * each % size == 0:
                end = number * each // 4
                began = time.perf_counter()
                works.append(dist.all_reduce(gradients[end - size // 4 : end], async_op=True))
                hosts.append(time.perf_counter() - began)
        for work in works:
            work.wait()

    hosts: list[float] = []  # how long starting an all-reduce took, while one before it may be under way
    singles: dict[int, list[float]] = {size: [] for size in SIZES}
    measured: dict[str, dict[int, list[float]]] = {}
    for _ in range(SINGLES // 4):
        slowest(lambda: step(4 * MB, lambda: time.sleep(1e-4)))
    host_s = statistics.mean(sorted(hosts)[: len(hosts) * 9 // 10])  # but for the ticks of a scheduler
    for repeat in range(-1, SINGLES):
        for size in SIZES:
            took = slowest(lambda size=size: single(size))
            singles[size] += [took] if repeat >= 0 else []
    alone = {}
    for name, (kind, seconds) in backwards.items():
        part = _part(kind, seconds / PARTS)
        alone[name] = statistics.median(slowest(lambda part=part: [part() for _ in range(PARTS)]) for _ in range(5))
        times = measured[name] = {size: [] for size in SIZES}
        for repeat in range(-1, rounds):
            gradients.fill_(1.0)
            for size in SIZES if repeat % 2 else SIZES[::-1]:
                took = slowest(lambda size=size, part=part: step(size, part))
                times[size] += [took] if repeat >= 0 else []
    if dist.get_rank() == 0:
        print(json.dumps({"singles": singles, "host": host_s, "measured": measured, "alone": alone}))
    dist.destroy_process_group()


def _part(kind: str, seconds: float) -> Callable[[], None]:
    """Return one part of a backward: a sleep, or products that take as long when nobody disturbs them."""
    import torch

    if kind == "sleep":
        return lambda: time.sleep(seconds)
    one, other = torch.randn(128, 128), torch.randn(128, 128)
    best = min(_took(lambda: one @ other) for _ in range(200))
    count = max(round(seconds / best), 1)

    def work() -> None:
        for _ in range(count):
            one @ other

    return work


def _took(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def launch(args: argparse.Namespace) -> Any:
    """Start fresh ranks, here or in a box, and return what rank 0 measured."""
    arguments = ["--rounds", str(args.rounds)]
    if args.box is None:
        return on_loopback(__file__, arguments, 2, LIMIT_S)
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec, parse_rate

    with box_up(BoxSpec(name=f"buckets{os.getpid()}", nodes=4, rate=parse_rate(args.box))) as box:
        return in_nodes(box, __file__, [*arguments, "--box", args.box], LIMIT_S)


def fitted(singles: dict[str, list[float]]) -> curves.Fitted:
    """Fit a curve through the medians, as `muster bench fit` does."""
    return heldout.fitted(tuple(sorted((int(size), statistics.median(times)) for size, times in singles.items())))


def compare(found: dict[str, Any], fit: curves.Fitted, backward: str, how: str) -> dict[str, Any]:
    """Predict the sweep and choose; return the choice with its regret."""
    gradients = buckets.uniform(TOTAL, PARTS, found["alone"][backward])
    points = buckets.curve(
        gradients, fit.seconds, Lanes(buckets.GLOO_THREADS, host_s=found["host"]), SIZES, buckets.at_most
    )
    measured = {int(size): statistics.median(times) for size, times in found["measured"][backward].items()}
    choice = buckets.choose(points, 0.0)
    best = min(measured, key=lambda size: measured[size])
    errors = [abs(point.step_s / measured[point.bucket_bytes] - 1) for point in points]
    return {
        "backward": backward,
        "fit": how,
        "chosen": choice.best.bucket_bytes,
        "best": best,
        "regret": measured[choice.best.bucket_bytes] / measured[best] - 1,
        "mean_error": statistics.mean(errors),
        "largest_error": max(errors),
        "predicted_ms": [round(1e3 * point.step_s, 2) for point in points],
        "measured_ms": [round(1e3 * measured[size], 2) for size in SIZES],
    }


def show(row: dict[str, Any]) -> None:
    """Print one comparison."""
    print(
        f"{row['backward']:>10}  {row['fit']:<11}  chosen {row['chosen'] // MB:>2} MB, best {row['best'] // MB:>2} MB, "
        f"regret {100 * row['regret']:.1f} %; errors mean {100 * row['mean_error']:.0f} %, "
        f"largest {100 * row['largest_error']:.0f} %"
    )
    print(f"            measured  {row['measured_ms']} ms")
    print(f"            predicted {row['predicted_ms']} ms")


def verdict(rows: Sequence[dict[str, Any]], how: str, kind: str) -> bool:
    """Print the regret of one fit under one kind of backward; say whether its median is in reach."""
    regrets = [row["regret"] for row in rows if row["fit"] == how and row["backward"].startswith(kind)]
    middle = statistics.median(regrets)
    print(
        f"{how}, {kind}: regret {100 * middle:.1f} % (median of {len(regrets)}; largest {100 * max(regrets):.1f} %); "
        f"reach <= {100 * REACH[how]:.0f} %: {'yes' if middle <= REACH[how] else 'NO'}"
    )
    return middle <= REACH[how]


def main() -> int:
    """Measure launches, compare each with its own fit and with the one before, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--box", metavar="RATE", help="four nodes of a box, such as 1gbit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="two launches of three rounds")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.launches = 3, 2
    if args.rank:
        rank_main(args.rounds, IN_BOX if args.box else BACKWARDS)
        return 0
    launches = [launch(args) for _ in range(args.launches)]
    fits = [fitted(found["singles"]) for found in launches]
    rows = []
    for number, found in enumerate(launches):
        for backward in found["measured"]:
            rows.append(compare(found, fits[number], backward, "same launch"))
            rows.append(compare(found, fits[number - 1], backward, "stored"))
    for row in rows:
        show(row)
    reached = [verdict(rows, how, kind) for how in REACH for kind in ("sleep", "work")]
    curves = [{"line": fit.line.model_dump(), "is_line": not fit.points} for fit in fits]
    print(
        json.dumps({"benchmark": "bucket size", "box": args.box, "rows": rows, "fits": curves, "reached": all(reached)})
    )
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
