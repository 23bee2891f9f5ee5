"""NCCL on the GPUs of one host: the numbers of `muster bench` against a bare loop timed by events, in one process.

    bare      barrier, event, N calls back to back, event; / N; the slowest rank's; no code of ours, tensors of its own
    ours      collectives_bench/ranks: warm-up, samples one by one behind a busy-wait (the median), and the loop back to
              back that every block ends with; data written and every element of the result compared

For each operation and size both are measured in turns, bare first and last, and their medians are compared.
Held to reach is the loop, for a bare loop is one: like with like. A single call, which `muster bench` shows as its
time, pays the start of its kernels alone, which no loop shows; its ratio stands beside. busbw is as in nccl-tests, GB/s
is 1e9 bytes a second. Measured before on 4 x H200 with such a loop: all_reduce 1 GB 354 GB/s, 1 MB in 32 us.

    .venv/bin/python benchmarks/nccl_bare.py [--gpus 2 4] [--sizes 1M:1G:4] [--operations ...] [--quick]

It starts its own ranks and needs no network but the host's own. An operation that fails is named and left out, and the
rest is measured by new ranks.
"""

import os
import statistics
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from harness import Options, finish
from ranks import hear, say

REACH = 0.02
HELD_BYTES = 64 * 2**20
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
SIZES = "1M:1G:4"
REPEATS = 4
BARE_S = 0.04  # about how long a bare loop takes
START_LIMIT_S = 120.0
ROW_LIMIT_S = 40.0
BLOCK_S = 0.25


def rank_main(operations: list[str], sizes: list[int]) -> None:
    """Be one rank: measure what is asked for; rank 0 says each operation begun and each row."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    control = dist.new_group(backend="gloo")
    say("ready", torch=torch.__version__, nccl=".".join(map(str, torch.cuda.nccl.version())))
    for name in operations:
        say("enter", operation=name)
        for size in sizes:
            say("row", **measure(name, size, control, device))
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def measure(name: str, size: int, control: Any, device: Any) -> dict[str, Any]:
    """Time one operation at one size, bare and ours, in microseconds on the slowest rank."""
    import torch
    import torch.distributed as dist

    from muster.collectives_bench.catalog import OPERATIONS as CATALOG
    from muster.collectives_bench.catalog import actual_bytes
    from muster.collectives_bench.ranks.nccl import StreamClock
    from muster.collectives_bench.ranks.operations import prepare
    from muster.collectives_bench.ranks.sampling import CallSampler, ControlGroup
    from muster.collectives_bench.records import BenchCell
    from muster.collectives_bench.settings import BenchSettings

    group = dist.group.WORLD
    assert group is not None
    operation, ranks = CATALOG[name], dist.get_world_size()
    nbytes = actual_bytes(operation, size, ranks, "fp32")
    control_group = ControlGroup(control, lambda: None)
    bare = bare_call(name, nbytes // 4, device)
    calls = bare_calls(bare, control_group)
    cell = BenchCell(operation=name, dtype="fp32", asked_bytes=size, place=operation.places[0])
    call = prepare(cell, nbytes, group, device)
    sampler = CallSampler(StreamClock(control_group, group, device), control_group, BenchSettings(block_s=BLOCK_S))
    call.fill()
    first_us = sampler.first(call.run)
    wrong = torch.tensor(call.wrong())
    dist.all_reduce(wrong, group=control)
    sampler.warm_up(call.run, first_us)
    single_us = median(sampler.latency(call.run).slowest)
    bare_us, loop_us = [bare_loop(bare, calls, control_group)], []
    for repeat in range(REPEATS):  # bare, ours, ours, bare, bare, ...: what drifts meets both
        for ours in (True, False) if repeat % 2 == 0 else (False, True):
            if ours:
                loop_us.append(sampler.back_to_back(call.run, single_us))
            else:
                bare_us.append(bare_loop(bare, calls, control_group))
    return {
        "operation": name,
        "ranks": ranks,
        "nbytes": nbytes,
        "bare_us": bare_us,
        "loop_us": loop_us,
        "single_us": single_us,
        "wrong": int(wrong.item()),
        "factor": operation.bus_factor(ranks),
    }


def bare_call(name: str, count: int, device: Any) -> Callable[[], object]:
    """Return an operation as anybody would write it, on tensors of its own; `count` elements are S."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(count, device=device)
    other = torch.zeros(count if name in ("all_to_all", "send_recv") else count // ranks, device=device)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def send_recv() -> None:
        ops = [
            dist.P2POp(dist.isend, whole, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, other, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, other),
        "reduce_scatter": lambda: scatter(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "send_recv": send_recv,
    }
    return calls[name]


def bare_loop(run: Callable[[], object], calls: int, control_group: Any) -> float:
    """Time calls back to back between two events; return the microseconds of one on the slowest rank."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    control_group.barrier()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    everybody = control_group.gather([begin.elapsed_time(end) / calls * 1e3])
    return float(max(each[0] for each in everybody))


def bare_calls(run: Callable[[], object], control_group: Any) -> int:
    """Warm up, and return how many calls make a bare loop long enough."""
    bare_loop(run, 3, control_group)
    return max(10, min(200, int(BARE_S * 1e6 / bare_loop(run, 5, control_group))))


def play(gpus: int, operations: list[str], sizes: list[int]) -> list[dict[str, Any]]:
    """Measure on so many GPUs, with new ranks after each operation that fails; print and return the rows."""
    rows: list[dict[str, Any]] = []
    left = list(operations)
    while left:
        now, failed = left[0], ""
        limits = {"limit_s": float("inf"), "start_s": START_LIMIT_S, "silence_s": ROW_LIMIT_S, "patience_s": 10.0}
        for said in hear(rank_main, gpus, **limits, operations=left, sizes=sizes):
            now = said.get("operation", now)
            if said["say"] == "ready":
                print(f"  torch {said['torch']}, NCCL {said['nccl']}, {gpus} GPUs")
            elif said["say"] == "row":
                rows.append(said)
                show(said)
            elif said["say"] == "failed":
                failed = said["why"]
        if not failed:
            break
        print(f"  {now}: NOT MEASURED TO ITS END: {failed}", flush=True)
        rows.append({"operation": now, "reason": failed, "ranks": gpus, "held": True, "reached": False})
        left = left[left.index(now) + 1 :]
    return rows


def show(row: dict[str, Any]) -> None:
    """Print one row, and write into it what follows from it: bandwidths and ratios."""
    from muster.collectives_bench.sizes import size_text

    bare, loop = statistics.median(row["bare_us"]), statistics.median(row["loop_us"])
    gb_s = row["nbytes"] * row["factor"] / 1e3  # / microseconds
    row["loop_ratio"], row["single_ratio"] = loop / bare, row["single_us"] / bare
    row["held"] = row["nbytes"] >= HELD_BYTES * 0.99  # chunks are rounded down
    row["reached"] = row["wrong"] == 0 and (not row["held"] or abs(row["loop_ratio"] - 1) <= REACH)
    verdict = ("yes" if row["reached"] else "NO") if row["held"] or row["wrong"] else "-"
    spread = max(row["bare_us"]) / min(row["bare_us"]) - 1
    print(
        f"  {row['operation']:16} {row['ranks']:2d} {size_text(row['nbytes']):>9} {bare:10.1f} {loop:10.1f} "
        f"{row['single_us']:10.1f} {gb_s / bare:8.1f} {gb_s / loop:8.1f} {gb_s / row['single_us']:8.1f} "
        f"{row['loop_ratio']:7.3f} {row['single_ratio']:7.3f} {spread:7.3f} {row['wrong']:5d}  {verdict}",
        flush=True,
    )


def main() -> int:
    """Measure on 2 GPUs, on 4, report."""
    from muster.collectives_bench.sizes import parse_sizes

    parser = Options(__doc__, quick={"sizes": "64M,1G"})
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sizes", default=SIZES, help="as in muster bench; several with commas")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    args = parser.parse_args()
    sizes = sorted({size for word in args.sizes.split(",") for size in parse_sizes(word)})
    import torch

    there = torch.cuda.device_count()  # starts no CUDA here
    rows = []
    print("  times in us, busbw in GB/s; ratios are ours / bare; spread is that of the bare loops")
    print(
        f"  {'operation':16} {'n':>2} {'size':>9} {'bare':>10} {'loop':>10} {'single':>10} {'bare':>8} {'loop':>8} "
        f"{'single':>8} {'loop':>7} {'single':>7} {'spread':>7} {'wrong':>5}  within {REACH:.0%}"
    )
    for gpus in args.gpus:
        if gpus > there:
            print(f"  {gpus} GPUs: not here, {there} found")
            continue
        rows += play(gpus, args.operations, sizes)
    print("  rows below 64 MB stand beside")
    held = [row for row in rows if row["held"] or row["wrong"]]
    return finish(args, "nccl_bare", held, reach=REACH, beside=[row for row in rows if row not in held])


if __name__ == "__main__":
    sys.exit(main())
