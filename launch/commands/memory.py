"""`muster memory`: a rank's memory, predicted from a job file or a number of parameters, or measured in a run."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.jobs.basics.errors import MusterError, UsageError
from muster.launch.common import options

if TYPE_CHECKING:
    from muster.jobs.runfolder.rundir import RunDir
    from muster.launch.bench.counting import OwnCode

MOST_SHOWN: Final = 8  # ranks
OPTIONS: Final = {  # {input: the options that apply to it}
    "a job file": (
        ("--world", "world"),
        ("--modes", "modes"),
        ("--set", "overrides"),
        ("--backend", "backend"),
        ("--memory", "memory"),
        ("--microbatches", "microbatches"),
    ),
    "a run": (("--rank", "rank"), ("--attempt", "attempt"), ("--runs", "runs")),
    "--parameters": (("--optimizer-states", "optimizer_states"), ("--bits", "bits"), ("--world", "world")),
}
EPILOG: Final = """\
muster memory job.yaml --world 8 --memory 80G     parameters, gradients, optimizer, buffers, activations, by mode
muster memory                                     measured and predicted memory of the newest run
muster memory --parameters 10e9 --optimizer-states 3 --bits 16,16,32 --world 8      ZeRO stages without a model
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from muster.launch.bench.loads import MICROBATCHES

    parser.epilog = EPILOG
    parser.add_argument(
        "target",
        metavar="JOB|RUN",
        nargs="?",
        help="a job file (YAML), or a run by its id or part of it (default: the newest run)",
    )
    options.add_json(parser)
    numbers = parser.add_argument_group("for a number of parameters, without a model")
    numbers.add_argument(
        "--parameters", metavar="P", help="number of parameters, such as 10e9, 10B or 1.3M; requires --world"
    )
    numbers.add_argument(
        "--optimizer-states",
        metavar="K",
        type=int,
        help="states per parameter: 0 plain SGD, 1 momentum, 2 Adam, 3 Adam with float32 masters",
    )
    numbers.add_argument(
        "--bits", metavar="P,G,O", help="bits per parameter, gradient and optimizer state (default: 32)"
    )
    job = parser.add_argument_group("for a job")
    job.add_argument("--world", metavar="N", type=int, help="number of ranks (default: the job's)")
    job.add_argument("--modes", metavar="NAMES", help="only these modes, separated by commas (default: all)")
    job.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl if the job has device: cuda")
    job.add_argument("--memory", metavar="SIZE", help="memory per rank, such as 80G; a mode may use nine tenths of it")
    job.add_argument(
        "--microbatches",
        metavar="M",
        type=int,
        help=f"micro-batches of pipelines (default: the job's, else {MICROBATCHES})",
    )
    options.add_set(job, "train.batch_size=256")
    run = parser.add_argument_group("for a run")
    run.add_argument("--rank", metavar="LIST", help=f"ranks such as 0,8-15 (default: the fullest {MOST_SHOWN})")
    options.add_attempt(run, "with records of memory")
    options.add_runs(run)


def run(args: argparse.Namespace) -> int:
    """Print predicted or measured memory as a table.

    Raises:
        UsageError: if options contradict each other or are invalid.
    """
    if args.parameters is not None and args.target is not None:
        raise UsageError(
            f"--parameters {args.parameters}: cannot be combined with a job or a run; leave {args.target} out"
        )
    is_job = args.target is not None and is_job_file(args.target)
    here = "a job file" if is_job else "a run" if args.parameters is None else "--parameters"
    allowed = {flag for flag, _ in OPTIONS[here]}
    for owner, flags in OPTIONS.items():
        for flag, name in flags:
            if flag not in allowed and getattr(args, name) not in (None, []):
                raise UsageError(
                    f"{flag}: does not apply to {here}; leave it out, or {'add' if owner[0] == '-' else 'name'} {owner}"
                )
    return {"--parameters": _of_numbers, "a job file": _of_job, "a run": _of_run}[here](args)


def is_job_file(target: str) -> bool:
    """Return whether `target` names a job file, existing or not, rather than a run."""
    return Path(target).suffix in (".yaml", ".yml") or Path(target).is_file()


def _of_numbers(args: argparse.Namespace) -> int:
    from muster.launch.bench import state_sizes

    record = state_sizes.sizes_of(options.given(args, state_sizes.StateSizesRequest))
    print(json.dumps(record, indent=1) if args.json else state_sizes.render(record))
    return 0


def _of_job(args: argparse.Namespace) -> int:
    from muster.launch.bench import memory_view
    from muster.launch.bench.wanted import Wanted

    record = memory_view.predict(replace(options.given(args, Wanted), job=args.target))
    print(json.dumps(record, indent=1) if args.json else memory_view.render(record))
    return 0


def _of_run(args: argparse.Namespace) -> int:
    from muster.jobs.runfolder.rundir import find_run, runs_root
    from muster.launch.look import memories, memory_view
    from muster.launch.look.attempts import of_ranks

    folder = find_run(runs_root(args.runs), args.target)
    attempt, every = memories.read_memories(folder, args.attempt)
    chosen = memories.fullest(every, MOST_SHOWN)
    if args.rank is not None:
        chosen = of_ranks(every, args.rank, int(every[0].facts["world_size"]))
    own, why = _own_code(folder, attempt)
    shown = [
        (each, memories.formula_of(folder, each, own)) for each in (every if args.json and not args.rank else chosen)
    ]
    copies = memories.MemoryCopies.read(folder)
    if args.json:
        ranks = [{**each.to_json(), "rows": memory_view.records(each, formula)} for each, formula in shown]
        copied = {} if copies is None else {"copies": copies.to_json()}
        print(json.dumps({"run": folder.run_id, "attempt": attempt, "ranks": ranks, **copied}))
        return 0
    print(memory_view.render(folder.run_id, attempt, shown, len(every), why, copies))
    return 0


def _own_code(folder: "RunDir", attempt: int) -> "tuple[OwnCode | None, str]":
    """Count the model and optimizer that a run's user code builds; return None and the reason if that fails."""
    from muster.launch.look import memories

    try:
        return memories.own_code_of(folder, attempt), ""
    except (MusterError, OSError, KeyError, AttributeError) as error:  # a run folder may contain anything
        return None, str(error)
