"""gloo in a box of four nodes at 1 Gbit/s against what the links allow: how much of the line rate collectives reach.

    all_reduce, ring_all_reduce                     2(n-1)/n * S / B     every link carries that much, each way
    gather                                          (n-1)/n * S / B      all that the others have goes through one link
    the others: reduce-scatters, all-gathers        (n-1)/n * S / B
    and all-to-alls, the library's and ours

So the share of the line rate is busbw / B. TCP, IP and Ethernet take 66 of every 1514 bytes: 0.956 is all there is.
The operations are those of `muster bench` (collectives_bench/ranks/operations.py), each result is compared element by
element, the time of a call is the slowest rank's, and the median of the calls counts. Held to reach are all_reduce and
our ring all-reduce at 10 MB and more, by a plain loop and once more by `muster bench` itself; and, because they say how
honest the box's links are, all_reduce of 25 MB and gather of 25 MB a rank, to 1.10 times the bound. A time below the
bound would mean links that are not shaped, and fails its row.

    sudo .venv/bin/python benchmarks/link_bounds.py [--rate 1gbit] [--nodes 4] [--repeats 9] [--quick] [--json FILE]
"""

import argparse
import statistics
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from bench_result import muster_bench
from harness import Options, finish, table, verdict
from ranks import most, on_ranks, place

if TYPE_CHECKING:
    from muster.cloudlab.box.control import Box
    from muster.collectives_bench.catalog import Operation

EXCHANGE = "exchange"  # all-to-all by ddp.primitives; no row of the catalog, for all_to_all is
OPERATIONS = (
    "all_reduce",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "ring_all_gather",
    "exchange_reduce_scatter",
    EXCHANGE,
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
)
HELD = ("all_reduce", "ring_all_reduce")
HELD_BYTES, REACH = 10_000_000, 0.90
LINK_BYTES, LINK_REACH = 25 * 2**20, 1 / 1.10  # a rank
LIMIT_S = 540
CEILING = 1448 / 1514


def operation_of(name: str) -> "Operation":
    """Return an operation of the catalog."""
    from muster.collectives_bench.catalog import OPERATIONS as CATALOG

    return CATALOG["all_to_all" if name == EXCHANGE else name]


def measure(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Time every operation at every size as a rank; return the slowest rank's times."""
    import torch
    import torch.distributed as dist

    from muster.collectives_bench.catalog import actual_bytes
    from muster.collectives_bench.ranks.operations import prepare
    from muster.collectives_bench.records import BenchCell
    from muster.ddp.primitives import exchange

    group = dist.group.WORLD
    assert group is not None
    found = []
    for name in OPERATIONS:
        operation = operation_of(name)
        for size in sizes:
            cell = BenchCell(operation=operation.name, dtype="fp32", asked_bytes=size, place=operation.places[0])
            nbytes = actual_bytes(operation, size, dist.get_world_size(), "fp32")
            call: Any = prepare(cell, nbytes, group, torch.device("cpu"))
            run = partial(exchange, call.input, call.output, group) if name == EXCHANGE else call.run
            times, wrong = [], 0
            for repeat in range(-2, repeats):
                call.fill()
                dist.barrier()
                started = time.perf_counter()
                run()
                took = time.perf_counter() - started
                took, differing = most(took, call.wrong())
                wrong += int(differing)
                if repeat >= 0:
                    times.append(took)
            found.append({"operation": name, "nbytes": nbytes, "times_s": times, "wrong": wrong, "by": ""})
    return found


def by_bench(box: "Box", args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what is held to reach once more, as a user does."""
    options = [",".join(HELD), "--sizes", ",".join(args.sizes), "--launches", str(args.launches), "--block-s", "2"]
    options += ["-N", str(args.nodes), "-n", "1", "--backend", "gloo", "--hosts", f"box:{box.state.spec.name}"]
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for block in muster_bench(*options, limit_s=LIMIT_S).blocks:
        name, key = block.cell.operation, (block.cell.operation, block.nbytes)
        new = {"operation": name, "nbytes": block.nbytes, "times_s": [], "wrong": 0, "by": "muster bench"}
        row = rows.setdefault(key, new)
        row["wrong"] += block.wrong if block.wrong is not None else 1  # a block that failed has none
        row["times_s"] += [each / 1e6 for each in block.samples_us]
    return list(rows.values())


def reach_of(row: dict[str, Any], nodes: int) -> float | None:
    """Return the share of the line rate that a row has to reach."""
    link_bytes = LINK_BYTES * (nodes if row["operation"] == "gather" else 1)
    if row["operation"] in ("all_reduce", "gather") and row["nbytes"] == link_bytes and not row["by"]:
        return LINK_REACH
    return REACH if row["operation"] in HELD and row["nbytes"] >= HELD_BYTES else None


def judge(row: dict[str, Any], nodes: int, rate: int) -> dict[str, Any]:
    """Add to a row its median time, its share of the line rate, and the verdict."""
    bound_s = operation_of(row["operation"]).bus_factor(nodes) * row["nbytes"] * 8 / rate
    median_s, reach = statistics.median(row["times_s"]), reach_of(row, nodes)
    share, best = bound_s / median_s, bound_s / min(row["times_s"])
    reached = row["wrong"] == 0 and best <= 1.0 and (reach is None or share >= reach)
    return row | {"median_s": median_s, "share": share, "best": best, "reach": reach, "reached": reached}


def cells(row: dict[str, Any]) -> list[str]:
    """Write a row of the table."""
    from muster.collectives_bench.sizes import size_text

    said = verdict(row["reached"], row["reach"], ">=") if row["reach"] or row["reached"] else "NO"
    numbers = [f"{row['median_s'] * 1e3:.1f}", f"{row['share']:.3f}", f"{row['best']:.3f}", str(row["wrong"])]
    return [row["operation"], size_text(row["nbytes"]), *numbers, row["by"], said]


def main() -> int:
    """Measure, compare with the bounds, report."""
    from muster.cloudlab.box.spec import parse_rate
    from muster.collectives_bench.sizes import parse_size

    parser = Options(__doc__, repeats=9, quick={"sizes": ["10M"], "repeats": 5, "launches": 1})
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--sizes", nargs="+", default=["10M", "25M", "100M"])
    parser.add_argument("--launches", type=int, default=3, help="of muster bench")
    args = parser.parse_args()
    rate = parse_rate(args.rate)
    if rate is None:
        parser.error("--rate none has no bound")
    with place(None, args.rate, args.nodes) as box:
        sizes = [parse_size(size) for size in args.sizes]
        found = on_ranks(measure, box, limit_s=LIMIT_S, sizes=sizes, repeats=args.repeats)
        rows = [judge(row, args.nodes, rate) for row in [*found, *by_bench(box, args)]]
    print(
        f"box, {args.nodes} nodes at {args.rate}; the share of the line rate that the busbw is: at most {CEILING:.3f}"
    )
    table(["operation", "size", "median ms", "share", "best", "wrong", "by", "reach"], map(cells, rows))
    return finish(args, "link_bounds", rows, nodes=args.nodes, rate=rate, ceiling=CEILING)


if __name__ == "__main__":
    sys.exit(main())
