"""gloo in a box of four nodes at 1 Gbit/s against the ring bound: how much of the line rate collectives reach.

    all_reduce, ring_all_reduce                     2(n-1)/n * S / B     every link carries that much, each way
    the others: reduce-scatters, all-gathers        (n-1)/n * S / B
    and all-to-alls, the library's and ours

So the share of the line rate is busbw / B. TCP, IP and Ethernet take 66 of every 1514 bytes: 0.956 is all there is.
The operations are those of `muster bench` (collectives_bench/ranks/operations.py), each result is compared element by
element, the time of a call is the slowest rank's, and the median of the calls counts. Held to reach are all_reduce and
our ring all-reduce at 10 MB and more, by a plain loop and once more by `muster bench` itself.

    sudo .venv/bin/python benchmarks/gloo_ring_bound.py [--rate 1gbit] [--nodes 4] [--repeats 9] [--quick]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from rank_processes import in_nodes

REACH = 0.90
SIZES = ("10M", "25M", "100M")
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
)
CATALOG_NAME = {EXCHANGE: "all_to_all"}
HELD = ("all_reduce", "ring_all_reduce")
BENCH = "muster bench"
ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 540
CEILING = 1448 / 1514


def rank_main(sizes: list[int], repeats: int) -> None:
    """Be one rank: time every operation at every size; rank 0 prints the slowest rank's times."""
    import torch
    import torch.distributed as dist

    from muster.collectives_bench.catalog import OPERATIONS as CATALOG
    from muster.collectives_bench.catalog import actual_bytes
    from muster.collectives_bench.ranks.operations import prepare
    from muster.collectives_bench.records import Cell
    from muster.ddp.primitives import exchange

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    found = []
    for name in OPERATIONS:
        operation = CATALOG[CATALOG_NAME.get(name, name)]
        for size in sizes:
            cell = Cell(operation=operation.name, dtype="fp32", asked_bytes=size, place=operation.places[0])
            nbytes = actual_bytes(operation, size, dist.get_world_size(), "fp32")
            call: Any = prepare(cell, nbytes, group, torch.device("cpu"))
            run = partial(exchange, call.input, call.output, group) if name == EXCHANGE else call.run
            times, wrong = [], 0
            for repeat in range(-2, repeats):
                call.fill()
                dist.barrier()
                started = time.perf_counter()
                run()
                took = torch.tensor([time.perf_counter() - started, 0.0], dtype=torch.float64)
                took[1] = call.wrong()
                dist.all_reduce(took, dist.ReduceOp.MAX)
                wrong += int(took[1].item())
                if repeat >= 0:
                    times.append(took[0].item())
            found.append({"operation": name, "nbytes": nbytes, "times_s": times, "wrong": wrong})
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def measure(args: argparse.Namespace, rate: int) -> list[dict[str, Any]]:
    """Boot a box; return what its ranks have seen, by this script's own loop and by `muster bench`."""
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec

    with box_up(BoxSpec(name=f"ring{os.getpid()}", nodes=args.nodes, rate=rate)) as box:
        own: list[dict[str, Any]] = in_nodes(
            box, __file__, ["--repeats", str(args.repeats), "--sizes", *args.sizes], LIMIT_S
        )
        return own + by_bench(box.state.spec.name, args)


def by_bench(box: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure what is held to reach once more, as a user does."""
    from muster.collectives_bench.results.files import read_result

    with tempfile.TemporaryDirectory(prefix="ring-bound-") as folder:
        out = Path(folder) / "result.json"
        argv = [sys.executable, "-m", "muster", "bench", ",".join(HELD), "--sizes", ",".join(args.sizes)]
        argv += ["--launches", str(args.launches), "--block-s", "2", "-N", str(args.nodes), "-n", "1"]
        argv += ["--backend", "gloo", "--hosts", f"box:{box}", "--runs", folder, "--out", str(out)]
        # 1 is the verdict on a bad row; its numbers are there all the same.
        code = subprocess.run(argv, cwd=ROOT, stdout=sys.stderr, timeout=LIMIT_S, check=False).returncode
        if code not in (0, 1) or not out.is_file():
            raise SystemExit(f"muster bench ended with {code}")
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for block in read_result([out]).blocks:
            name, key = block.cell.operation, (block.cell.operation, block.nbytes)
            new = {"operation": name, "nbytes": block.nbytes, "times_s": [], "wrong": 0, "by": BENCH}
            row = rows.setdefault(key, new)
            row["wrong"] += block.wrong if block.wrong is not None else 1  # a block that failed has none
            row["times_s"] += [each / 1e6 for each in block.samples_us]
        return list(rows.values())


def shares(rows: list[dict[str, Any]], nodes: int, rate: int) -> list[dict[str, Any]]:
    """Add to every row its median time and its share of the line rate; faster than the wire would be no honest box."""
    from muster.collectives_bench.catalog import OPERATIONS as CATALOG

    for row in rows:
        bound_s = (
            CATALOG[CATALOG_NAME.get(row["operation"], row["operation"])].bus_factor(nodes) * row["nbytes"] * 8 / rate
        )
        row["median_s"] = statistics.median(row["times_s"])
        row["share"], row["best"] = bound_s / row["median_s"], bound_s / min(row["times_s"])
        row["held"] = row["operation"] in HELD and row["nbytes"] >= 10_000_000
        row["reached"] = row["wrong"] == 0 and row["best"] <= 1.0 and (row["share"] >= REACH or not row["held"])
    return rows


def main() -> int:
    """Measure, compare with the bounds, report."""
    from muster.cloudlab.box.spec import parse_rate
    from muster.collectives_bench.sizes import parse_size, size_text

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--launches", type=int, default=3, help="of muster bench")
    parser.add_argument("--quick", action="store_true", help="10 MB only, 5 calls of each, 1 launch")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.repeats, args.launches = ["10M"], 5, 1
    if args.rank:
        rank_main([parse_size(size) for size in args.sizes], args.repeats)
        return 0
    rate = parse_rate(args.rate)
    if rate is None:
        parser.error("--rate none has no bound")
    rows = shares(measure(args, rate), args.nodes, rate)
    print(
        f"box, {args.nodes} nodes at {args.rate}; the share of the line rate that the busbw is; at most {CEILING:.3f}"
    )
    print(f"  {'operation':24} {'size':>9} {'median':>10} {'share':>7} {'best':>7} {'wrong':>6}")
    for row in rows:
        verdict = "" if row["reached"] else "  NO"
        held = f"  reach >= {REACH}{verdict or ': yes'}" if row["held"] else verdict
        text = (
            f"  {row['operation']:24} {size_text(row['nbytes']):>9} {row['median_s'] * 1e3:8.1f}ms {row['share']:7.3f} "
            f"{row['best']:7.3f} {row['wrong']:6d}  {row.get('by', ''):12}{held}"
        )
        print(text.rstrip())
    reached = all(row["reached"] for row in rows)
    record = {"benchmark": "gloo_ring_bound", "reach": REACH, "reached": reached, "nodes": args.nodes, "rate": rate}
    print(json.dumps({**record, "ceiling": CEILING, "rows": rows}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
