"""`muster predict`: predicted times of exchanges or of a job's steps, from a cluster's profile or a link's speed."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import UsageError
from muster.launch.bench.wanted import Wanted
from muster.launch.common import options

if TYPE_CHECKING:
    from muster.collectives_bench.cost.profile import Prediction

COLUMNS: Final = ("operation", "size>", "ranks>", "nodes>", "time>", "from>", "to>", "algbw>", "busbw>", "how")
EPILOG: Final = """\
muster predict --profile P.json --op all_reduce --bytes 36.9MB --world 16     time of an exchange
muster predict --link 100Gbit --op all_reduce --bytes 20e9 --world 8          the same, from the formula alone
muster predict --profile P.json JOB.yaml                                      steps and memory of a job
muster predict JOB.yaml --goodput --nodes 2000 --node-mtbf 100d               useful time while nodes fail
Sizes mean the same as in muster bench (S); 1 MB is 2^20 bytes. With --link, each rank has its own node unless --nodes
is given.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("job", metavar="JOB", nargs="?", help="a job file: predict its steps instead of an exchange")
    source = parser.add_argument_group("from")
    source.add_argument("--profile", metavar="FILE.json", help="the profile written by muster bench fit")
    source.add_argument(
        "--link", metavar="RATE", help="use a link of this speed, such as 100Gbit, instead of a profile"
    )
    source.add_argument("--latency", metavar="TIME", help="latency of a message over --link, such as 50us (default: 0)")
    exchange = parser.add_argument_group("an exchange")
    exchange.add_argument(
        "--op",
        metavar="NAMES",
        help="operations of muster bench, separated by commas; all: the library's; ours: Muster's own",
    )
    exchange.add_argument(
        "--bytes", metavar="SIZES", help="such as 36.9MB, 512K:1G or 20e9; separate several by commas"
    )
    exchange.add_argument("--world", metavar="RANKS", help="number of ranks; separate several by commas")
    exchange.add_argument(
        "--nodes", metavar="N", type=int, help="number of nodes (default: the profile's for these ranks)"
    )
    exchange.add_argument("--backend", choices=("gloo", "nccl"), help="default: the profile's")
    exchange.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "int32"), help="default: the profile's")
    options.add_json(parser)
    steps = parser.add_argument_group("a job's steps")
    steps.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a value of the job, as in train.batch_size=256; can be repeated",
    )
    steps.add_argument("-n", "--ranks-per-node", metavar="M", type=int, help="same as --set ranks_per_node=M")
    steps.add_argument("--modes", metavar="NAMES", help="only these modes, separated by commas (default: all)")
    steps.add_argument(
        "--microbatches", metavar="M", type=int, help="micro-batches of pipelines (default: the job's, else 8)"
    )
    steps.add_argument(
        "--memory", metavar="SIZE", help="memory per rank, such as 80G; a mode may use nine tenths of it"
    )
    steps.add_argument(
        "--buckets", metavar="SIZES", nargs="?", const="", help="predict the step for bucket sizes such as 1M:64M"
    )
    steps.add_argument("--plot", metavar="FILE", help="also draw a plot: .png, .svg or .pdf")
    compute = parser.add_argument_group("compute times of a rank for its part of the batch")
    for name in ("forward", "backward", "optimizer"):
        compute.add_argument(f"--{name}-ms", metavar="MS", type=float, help=f"{name} time in milliseconds")
    compute.add_argument(
        "--run", metavar="RUN", dest="measured_run", help="take the times from this run of the same model"
    )
    options.add_runs(compute)
    _configure_goodput(parser.add_argument_group("goodput of a job on nodes that fail"))


def _configure_goodput(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--goodput", action="store_true", help="share of useful time, and the best interval between saves"
    )
    group.add_argument("--node-mtbf", metavar="TIME", help="mean time between failures of a node, such as 100d")
    group.add_argument("--save-every", metavar="TIME", help="interval between saves (default: Daly's)")
    group.add_argument("--step", metavar="TIME", help="time of a step (default: that of --run, else 1s)")
    group.add_argument("--stall", metavar="TIME", help="stall of training per save (default: from the job's state)")
    group.add_argument("--save-time", metavar="TIME", help="until a save is complete (default: from the job's state)")
    group.add_argument(
        "--restart", metavar="TIME", help="from a failure until training continues (default: Muster's measured times)"
    )


def run(args: argparse.Namespace) -> int:
    """Predict exchanges, or the steps of a job.

    Raises:
        UsageError: if options contradict each other or are invalid.
        RefusedError: if the profile lacks the operation or the world.
    """
    if args.job is not None:
        for flag, value in (("--op", args.op), ("--bytes", args.bytes), ("--world", args.world)):
            if value is not None:
                raise UsageError(
                    f"{flag} {value}: is for exchanges, so it cannot be combined with the job {args.job}; leave one out"
                )
        return _goodput(args) if args.goodput else _steps(args)
    if args.goodput:
        raise UsageError("--goodput: needs a job file; give JOB.yaml")
    records = predictions(args)
    print(json.dumps(records, indent=1) if args.json else render(records))
    return 0


def _steps(args: argparse.Namespace) -> int:
    from muster.launch.bench import choices, step_plot, step_text, step_view

    choices.check_output("--plot", args.plot, choices.PLOTS)
    record = step_view.predict(options.given(args, Wanted))
    if args.plot is not None:
        step_plot.plot(record, Path(args.plot))
    print(json.dumps(record, indent=1) if args.json else step_text.render(record))
    return 0


def _goodput(args: argparse.Namespace) -> int:
    from muster.launch.bench import goodput

    if args.step is None and args.measured_run is not None:
        args.step = f"{_mean_step_s(args):.6f}s"
    record = goodput.predict(options.given(args, goodput.GoodputWanted))
    print(json.dumps(record, indent=1) if args.json else goodput.render(record))
    return 0


def _mean_step_s(args: argparse.Namespace) -> float:
    from muster.jobs.runfolder.rundir import find_run, runs_root
    from muster.launch.look.steps import read_measured

    steps = read_measured(find_run(runs_root(args.runs), args.measured_run)).steps
    return sum(step.seconds for step in steps) / len(steps)


Asked = tuple[str, int, int, int]  # operation, bytes, ranks, nodes


def predictions(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Predict each operation for each size and world; return plain values."""
    from muster.launch.bench.closed_forms import ring
    from muster.launch.bench.source import source_of

    known = source_of(options.given(args, Wanted))
    for flag, value in (("--op", args.op), ("--world", args.world)):
        if value is None:
            raise UsageError(f"{flag} is missing; give a job file, or --op, --bytes and --world")
    if args.nodes is not None and args.nodes < 1:
        raise UsageError(f"--nodes {args.nodes}: must be a whole number from 1")
    asked = []
    for operation in _operations(args.op):
        for ranks in _worlds(args.world):
            nodes = known.nodes_of(ranks) if args.nodes is None else args.nodes
            for size in _sizes(operation, args.bytes):
                asked.append((operation, size, ranks, nodes))
    records = []
    for each in asked:
        operation, size, ranks, nodes = each
        found = known.predict(operation, size, ranks=ranks, nodes=nodes, backend=args.backend, dtype=args.dtype)
        records.append(describe(each, found) | {"ring": ring(known, operation, size, ranks, found.seconds)})
    return records


def _operations(text: str) -> list[str]:
    """Return the operations named by a list in the form of `muster bench`, in the given order."""
    from muster.collectives_bench.catalog import OPERATIONS
    from muster.collectives_bench.settings import ALL, OURS
    from muster.launch.bench import words

    lists = {is_ours: [name for name, each in OPERATIONS.items() if each.ours == is_ours] for is_ours in (False, True)}
    stands_for = {ALL: lists[False], OURS: lists[True]}
    return list(dict.fromkeys(each for name in words.operations(text) for each in stands_for.get(name, [name])))


def _sizes(operation: str, text: str | None) -> list[int]:
    from muster.collectives_bench.catalog import OPERATIONS
    from muster.collectives_bench.sizes import parse_sizes

    if operation in OPERATIONS and not OPERATIONS[operation].has_size:
        return [0]
    if text is None:
        raise UsageError(f"--bytes is missing; {operation} needs a size such as 36.9MB")
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise UsageError(f"--bytes: {error}") from error


def _worlds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--world {text}: must be numbers of ranks, such as 16 or 2,4,8") from None


def describe(asked: Asked, prediction: "Prediction") -> dict[str, Any]:
    """Return a prediction as plain values; `algbw` and `busbw` are in 1e9 bytes per second."""
    from muster.collectives_bench.catalog import OPERATIONS

    operation, size, ranks, nodes = asked
    algbw = size / prediction.seconds / 1e9 if size and prediction.seconds else None
    return {
        "operation": operation,
        "bytes": size,
        "ranks": ranks,
        "nodes": nodes,
        "seconds": prediction.seconds,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "algbw": algbw,
        "busbw": algbw and algbw * OPERATIONS[operation].bus_factor(ranks),
        "how": prediction.how,
        "warnings": list(prediction.warnings),
    }


def render(records: list[dict[str, Any]]) -> str:
    """Format predictions as a table, followed by each distinct warning once."""
    from muster.collectives_bench.sizes import size_text, time_text
    from muster.jobs.basics.words import counted
    from muster.launch.bench.closed_forms import MOST_RINGS, ring_text
    from muster.launch.common import screen

    rows = [
        (
            each["operation"],
            size_text(each["bytes"]) if each["bytes"] else "-",
            str(each["ranks"]),
            str(each["nodes"]),
            *(time_text(each[key]) for key in ("seconds", "low_s", "high_s")),
            *(f"{each[key]:.3g} GB/s" if each[key] else "-" for key in ("algbw", "busbw")),
            each["how"],
        )
        for each in records
    ]
    warnings = dict.fromkeys(warning for each in records for warning in each["warnings"])
    rings = [ring_text(each["ring"]) for each in records if each["ring"]]
    more = ["", *rings[:MOST_RINGS]] if rings else []
    if len(rings) > MOST_RINGS:
        more.append(f"{counted(len(rings) - MOST_RINGS, 'more ring')}: --json lists the steps and bytes of all")
    return "\n".join([screen.table(COLUMNS, rows), *(f"warning: {warning}" for warning in warnings), *more])
