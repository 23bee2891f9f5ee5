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

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from harness import Options, finish, turns
from ranks import most, on_ranks, place

from muster.collectives_bench.cost import buckets, curves, heldout
from muster.collectives_bench.cost.buckets import MB, Lanes, PredictedBucket

TOTAL, PARTS = 64 * MB, 64
SINGLES = 20
SIZES = tuple(count * MB for count in (1, 2, 4, 8, 16, 32, 64))
BACKWARDS = {"sleep 50": ("sleep", 0.05), "sleep 150": ("sleep", 0.15), "work": ("work", 0.15)}
IN_BOX = {"sleep 500": ("sleep", 0.5), "sleep 1500": ("sleep", 1.5), "work": ("work", 0.5)}  # the network takes 0.8 s
REACH = {"same launch": 0.03, "stored": 0.10}
LIMIT_S = 900


def measure(rounds: int, backwards: dict[str, Sequence[Any]]) -> dict[str, Any]:
    """Time single all-reduces and bucketed backwards as a rank."""
    import torch
    import torch.distributed as dist

    gradients = torch.ones(TOTAL // 4)

    def slowest(run: Callable[[], object]) -> float:
        dist.barrier()
        return most(_took(run))[0]

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

    def sweep(run: Callable[[int], None], repeats: int) -> dict[str, list[float]]:
        return turns({str(size): partial(slowest, partial(run, size)) for size in SIZES}, repeats, warm_up=1)

    hosts: list[float] = []  # how long starting an all-reduce took, while one before it may be under way
    for _ in range(SINGLES // 4):
        slowest(lambda: step(4 * MB, lambda: time.sleep(1e-4)))
    host_s = statistics.mean(sorted(hosts)[: len(hosts) * 9 // 10])  # but for the ticks of a scheduler
    singles = sweep(single, SINGLES)
    alone, measured = {}, {}
    for name, (kind, seconds) in backwards.items():
        part = _part(kind, seconds / PARTS)
        alone[name] = statistics.median(slowest(lambda part=part: [part() for _ in range(PARTS)]) for _ in range(5))
        gradients.fill_(1.0)
        measured[name] = sweep(partial(step, part=part), rounds)
    return {"singles": singles, "host": host_s, "measured": measured, "alone": alone}


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


def fitted(singles: dict[str, list[float]]) -> curves.Fitted:
    """Fit a curve through the medians, as `muster bench fit` does."""
    return heldout.fitted(tuple(sorted((int(size), statistics.median(times)) for size, times in singles.items())))


def compare(found: dict[str, Any], fit: curves.Fitted, backward: str, how: str) -> dict[str, Any]:
    """Predict the sweep and choose; return the choice with its regret."""
    gradients = [
        PredictedBucket(TOTAL // PARTS, found["alone"][backward] * part / PARTS) for part in range(1, PARTS + 1)
    ]
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


def judge(rows: Sequence[dict[str, Any]], how: str, kind: str) -> dict[str, Any]:
    """Print the regret of one fit under one kind of backward; return the row, held to reach by its median."""
    regrets = [row["regret"] for row in rows if row["fit"] == how and row["backward"].startswith(kind)]
    middle = statistics.median(regrets)
    reached = middle <= REACH[how]
    print(
        f"{how}, {kind}: regret {100 * middle:.1f} % (median of {len(regrets)}; largest {100 * max(regrets):.1f} %); "
        f"reach <= {100 * REACH[how]:.0f} %: {'yes' if reached else 'NO'}"
    )
    return {"name": f"{how}, {kind}", "reach": REACH[how], "reached": reached, "regret": middle, "regrets": regrets}


def main() -> int:
    """Measure launches, compare each with its own fit and with the one before, report."""
    parser = Options(__doc__, quick={"rounds": 3, "launches": 2})
    parser.add_argument("--box", metavar="RATE", help="four nodes of a box, such as 1gbit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--launches", type=int, default=4)
    args = parser.parse_args()
    settings = {"rounds": args.rounds, "backwards": IN_BOX if args.box else BACKWARDS}
    launches = []
    for _ in range(args.launches):  # fresh ranks each time
        with place(None if args.box else 2, args.box or "") as where:
            launches.append(on_ranks(measure, where, limit_s=LIMIT_S, **settings))
    fits = [fitted(found["singles"]) for found in launches]
    choices = []
    for number, found in enumerate(launches):
        for backward in found["measured"]:
            choices.append(compare(found, fits[number], backward, "same launch"))
            choices.append(compare(found, fits[number - 1], backward, "stored"))
    for choice in choices:
        show(choice)
    rows = [judge(choices, how, kind) for how in REACH for kind in ("sleep", "work")]
    lines = [{"line": fit.line.model_dump(), "is_line": not fit.points} for fit in fits]
    return finish(args, "bucket size", rows, box=args.box, choices=choices, fits=lines)


if __name__ == "__main__":
    sys.exit(main())
