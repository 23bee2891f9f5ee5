"""The cost model on what it has not seen: sizes left out one at a time, and whole worlds, against what was measured.

    where      what is measured, through `muster bench`              reach
    loopback   gloo on this machine, 2, 3 and 4 ranks, 64 KB - 64 MB  sizes: median 8 %, 90 % of them within 20 %;
                                                                      4 ranks from 2 and 3: mean 15 %
    box        gloo, 2, 3 and 4 nodes of a box, 1 Gbit/s, 1 - 32 MB   sizes: mean 5 %; worlds: mean 10 %
    gpu        NCCL, 2, 3 and 4 GPUs, if there are; 1 MB - 1 GB       as in the box
    FILE...    results of muster bench, measured before               as in the box; --reach loopback

A size is left out of the whole procedure, the choice of the model included; the first and the last size stay. A world
is left out of the curves and of the constants; of fewer than three worlds none can be, and
what is to be reached there is "not measured". Published predictors of collectives are 5 - 20 % off (ASTRA-sim 9.7 to
20.6, NCCL's own line up to 2.5 times at middle sizes). The share of held-out sizes inside the 90 % interval is printed.
What counts as measured is the median of launch medians; of launches in which others took less than 10 % of the cores,
where there are three. On a busy machine the loopback's numbers say little: a launch repeats itself to 30 % then.

    sudo .venv/bin/python benchmarks/cost_model.py box|loopback|gpu|FILE... [--quick] [--launches N] [--keep FILE.json]
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench_result import muster_bench
from harness import Options, finish
from ranks import place

from muster.collectives_bench.cost.curves import Errors
from muster.collectives_bench.cost.fit import curves_of, series_of
from muster.collectives_bench.cost.heldout import Pair, errors_of
from muster.collectives_bench.cost.worlds import Known, Shared, cores_of, hosts_of
from muster.collectives_bench.records import Result
from muster.collectives_bench.results.files import read_result
from muster.collectives_bench.results.rows import rows_of

OPERATIONS: Final = "all_reduce,all_gather,reduce_scatter,broadcast,reduce,gather,scatter,all_to_all,send_recv"
GPU_OPERATIONS: Final = "all_reduce,all_gather,reduce_scatter,broadcast,reduce,all_to_all,send_recv"
QUICK_OPERATIONS: Final = "all_reduce,broadcast,all_to_all"
SIZES: Final = {
    "loopback": "64K,160K,512K,1M,2.5M,4M,10M,16M,32M,64M",
    "box": "1M,1.6M,2.5M,4M,6.3M,10M,16M,25M,32M",
    "gpu": "1M,2M,4M,8M,16M,32M,64M,128M,256M,512M,1G",
}
QUICK_SIZES: Final = {"loopback": "64K,512K,2M,8M,32M", "box": "1M,2M,4M,8M,16M", "gpu": "1M,8M,64M,256M,1G"}
LAUNCHES: Final = {"loopback": 5, "box": 3, "gpu": 3}  # shaped links and GPUs differ less between launches
BLOCK_S: Final = {"loopback": 0.25, "box": 0.4, "gpu": 0.1}
WORLDS: Final = "2,3,4"
LIMIT_S: Final = 5400.0
WORDS: Final = {True: "yes", False: "NO", None: "not measured"}


def main() -> int:
    """Measure or read, hold out, and print; 1 where something is out of reach."""
    parser = Options(__doc__, quick={}, note="three operations at five sizes, two launches")
    parser.add_argument("where", nargs="+", help="loopback, box, gpu, or result files")
    parser.add_argument("--launches", type=int, help="default: 5, or 3 in a box and on GPUs; 2 with --quick")
    parser.add_argument("--sizes", help="others than usual")
    parser.add_argument("--operations", help="others than usual, with commas")
    parser.add_argument("--worlds", default=WORLDS, help=f"ranks or nodes (default: {WORLDS})")
    parser.add_argument("--keep", type=Path, metavar="FILE.json", help="keep what was measured there")
    parser.add_argument("--reach", choices=("loopback", "box", "gpu"), help="whose reach holds for FILE (default: box)")
    args = parser.parse_args()
    where = args.where[0] if len(args.where) == 1 and args.where[0] in SIZES else "file"
    result = read_result([Path(each) for each in args.where]) if where == "file" else measured(where, args)
    return report(result, where, args.reach or (where if where != "file" else "box"), args)


def measured(where: str, args: argparse.Namespace) -> Result:
    """Measure through `muster bench` and return its records."""
    operations = args.operations or (
        QUICK_OPERATIONS if args.quick else GPU_OPERATIONS if where == "gpu" else OPERATIONS
    )
    sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)[where]
    launches = str(args.launches or (2 if args.quick else LAUNCHES[where]))
    with options_of(where, args.worlds) as options:
        options += [operations, "--sizes", sizes, "--launches", launches, "--block-s", str(BLOCK_S[where])]
        return muster_bench(*options, limit_s=LIMIT_S, keep=args.keep)


@contextlib.contextmanager
def options_of(where: str, worlds: str) -> Iterator[list[str]]:
    """Give the options that say where the ranks are; a box lives as long as they are used."""
    if where == "loopback":
        yield ["--backend", "gloo", "--device", "cpu", "-n", worlds]
    elif where == "gpu":
        yield ["--backend", "nccl", "--device", "cuda", "-n", fitting(worlds, visible_gpus())]
    else:
        with place(None, "1gbit") as box:
            yield ["--backend", "gloo", "-N", worlds, "-n", "1", "--hosts", f"box:{box.state.spec.name}"]


def visible_gpus() -> int:
    """Return the GPUs that a process here may use: the driver's list names those of other containers too."""
    import torch

    return torch.cuda.device_count()


def fitting(worlds: str, gpus: int) -> str:
    """Return the worlds that so many GPUs allow; says what is left out.

    Raises:
        SystemExit: none.
    """
    wanted = [int(word) for word in worlds.split(",")]
    found = [ranks for ranks in wanted if ranks <= gpus]
    if not found:
        raise SystemExit(f"{gpus} GPUs are visible here, {min(wanted)} or more are needed")
    if found != wanted:
        print(f"{gpus} GPUs are visible here: worlds of {worlds} become {found}", file=sys.stderr)
    return ",".join(map(str, found))


def report(result: Result, where: str, reach: str, args: argparse.Namespace) -> int:
    """Print the held-out errors by operation and world, and all together; 1 where something is out of reach."""
    known = curves_of([each for each in series_of(rows_of(result)) if each.is_enough and not each.key.back_to_back], 0)
    sizes = [pair for each in known for pair in each.left_out]
    print(f"{where}: {len(known)} curves; held-out sizes")
    by_operation: dict[str, list[Pair]] = {}
    for each in known:
        by_operation.setdefault(each.curve.operation, []).extend(each.left_out)
    for name, pairs in by_operation.items():
        print(line(name, errors_of(pairs)))
    print(line("all", errors_of(sizes)))
    inside = coverage(known)
    print(f"  inside their 90 % interval: {inside:.0%}")
    worlds = held_out_worlds(result, known)
    print("held-out worlds")
    for (ranks, nodes), pairs in worlds.items():
        print(line(f"{ranks} on {nodes}", errors_of(pairs)))
    everywhere = [pair for pairs in worlds.values() for pair in pairs]
    print(line("all", errors_of(everywhere)))
    largest = errors_of(worlds[max(worlds)]) if worlds else None
    reached = verdicts(reach, errors_of(sizes), errors_of(everywhere), largest)
    for text, is_reached in reached.items():
        print(f"  reach: {text}: {WORDS[is_reached]}")
    # What cannot be measured is neither reached nor missed: the record says which.
    rows = [{"name": text, "reached": is_reached} for text, is_reached in reached.items() if is_reached is not None]
    not_measured = [text for text, is_reached in reached.items() if is_reached is None]
    unknown = {"reached": None} if not_measured and False not in reached.values() else {}
    kinds = {kind: sum(each.curve.kind == kind for each in known) for kind in {each.curve.kind for each in known}}
    return finish(
        args,
        f"cost model, {where}",
        rows,
        **unknown,
        not_measured=not_measured,
        held_out_sizes=plain(errors_of(sizes)),
        held_out_worlds=plain(errors_of(everywhere)),
        largest_world=plain(largest),
        operations={name: plain(errors_of(pairs)) for name, pairs in by_operation.items()},
        coverage_90=inside,
        kinds=kinds,
    )


def held_out_worlds(result: Result, known: list[Known]) -> dict[tuple[int, int], list[Pair]]:
    """Predict each world from all others; the largest one is an extrapolation."""
    shared = Shared(known, hosts_of(result.headers), cores_of(result.headers))
    found: dict[tuple[int, int], list[Pair]] = {}
    for group in shared.groups():
        for world, pairs in shared.worlds_left_out(group).items():
            found.setdefault(world, []).extend(pairs)
    return found


def coverage(known: Sequence[Known]) -> float:
    """Return the share of held-out sizes that lie inside the interval of their prediction."""
    inside = [
        each.curve.low <= measured / predicted <= each.curve.high
        for each in known
        for predicted, measured in each.left_out
    ]
    return sum(inside) / len(inside) if inside else 0.0


def verdicts(reach: str, sizes: Errors | None, worlds: Errors | None, largest: Errors | None) -> dict[str, bool | None]:
    """Compare with what is to be reached; None: nothing could be left out."""
    if reach == "loopback":
        return {
            "sizes: median 8 %": sizes and sizes.median <= 0.08,
            "sizes: 90 % within 20 %": sizes and sizes.within_20 >= 0.9,
            "largest world from the others: mean 15 %": largest and largest.mean <= 0.15,
        }
    return {
        "sizes: mean 5 %": sizes and sizes.mean <= 0.05,
        "worlds: mean 10 %": worlds and worlds.mean <= 0.10,
    }


def line(name: str, errors: Errors | None) -> str:
    """Write a row: mean, median, largest, shares."""
    if errors is None:
        return f"  {name:<16} nothing"
    return (
        f"  {name:<16} mean {errors.mean:6.1%}  median {errors.median:6.1%}  max {errors.largest:6.1%}  "
        f"in 10 % {errors.within_10:4.0%}  in 20 % {errors.within_20:4.0%}  of {errors.points}"
    )


def plain(errors: Errors | None) -> dict[str, Any] | None:
    """Return errors as plain values."""
    return errors.model_dump() if errors is not None else None


if __name__ == "__main__":
    sys.exit(main())
