"""`muster memory`: predict what a rank holds, from a job file or from a number of parameters; show what a run held."""

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
OPTIONS: Final = {  # by what they belong to
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
muster memory                                     what the newest run's ranks held, beside the formula
muster memory --parameters 10e9 --optimizer-states 3 --bits 16,16,32 --world 8      ZeRO stages without a model
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from muster.launch.bench.loads import MICROBATCHES

    parser.epilog = EPILOG
    parser.add_argument(
        "target", metavar="JOB|RUN", nargs="?", help="a job file (YAML), or a run: its id, part of it (the newest)"
    )
    options.add_json(parser)
    numbers = parser.add_argument_group("of a number of parameters, without a model")
    numbers.add_argument("--parameters", metavar="P", help="how many, such as 10e9, 10B or 1.3M; needs --world, too")
    numbers.add_argument(
        "--optimizer-states", metavar="K", type=int, help="0: plain SGD, 1: momentum, 2: Adam, 3: with masters"
    )
    numbers.add_argument("--bits", metavar="P,G,O", help="of parameters, gradients, optimizer states (default: 32)")
    job = parser.add_argument_group("of a job")
    job.add_argument("--world", metavar="N", type=int, help="ranks (default: the job's)")
    job.add_argument("--modes", metavar="NAMES", help="only these, with commas (default: all, built or not)")
    job.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl where the job says device: cuda")
    job.add_argument("--memory", metavar="SIZE", help="of a rank, such as 80G: a mode may fill nine tenths of it")
    job.add_argument(
        "--microbatches", metavar="M", type=int, help=f"of pipelines (default: the job's, else {MICROBATCHES})"
    )
    options.add_set(job, "train.batch_size=256")
    run = parser.add_argument_group("of a run")
    run.add_argument("--rank", metavar="LIST", help=f"these ranks, like 0,8-15 (default: the fullest {MOST_SHOWN})")
    options.add_attempt(run, "that said anything")
    options.add_runs(run)


def run(args: argparse.Namespace) -> int:
    """Print a table of predictions, or of a run.

    Raises:
        UsageError: options that do not go together, or make no sense.
    """
    if args.parameters is not None and args.target is not None:
        raise UsageError(f"--parameters {args.parameters}: needs no job and no run; leave {args.target} out")
    is_job = args.target is not None and is_job_file(args.target)
    here = "a job file" if is_job else "a run" if args.parameters is None else "--parameters"
    allowed = {flag for flag, _ in OPTIONS[here]}
    for owner, flags in OPTIONS.items():
        for flag, name in flags:
            if flag not in allowed and getattr(args, name) not in (None, []):
                raise UsageError(
                    f"{flag}: does not go with {here}; leave it out, or {'give' if owner[0] == '-' else 'name'} {owner}"
                )
    return {"--parameters": _of_numbers, "a job file": _of_job, "a run": _of_run}[here](args)


def is_job_file(target: str) -> bool:
    """True for what is a job file and not a run, even if it is not there."""
    return Path(target).suffix in (".yaml", ".yml") or Path(target).is_file()


def _of_numbers(args: argparse.Namespace) -> int:
    from muster.launch.bench import state_sizes

    record = state_sizes.sizes_of(options.given(args, state_sizes.Asked))
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
    if args.json:
        ranks = [{**each.to_json(), "rows": memory_view.records(each, formula)} for each, formula in shown]
        print(json.dumps({"run": folder.run_id, "attempt": attempt, "ranks": ranks}))
        return 0
    print(memory_view.render(folder.run_id, attempt, shown, len(every), why))
    return 0


def _own_code(folder: "RunDir", attempt: int) -> "tuple[OwnCode | None, str]":
    """Count what the user's code of a run makes; None, and why, where it cannot be counted."""
    from muster.launch.look import memories

    try:
        return memories.own_code_of(folder, attempt), ""
    except (MusterError, OSError, KeyError, AttributeError) as error:  # nothing read from a run folder is trusted
        return None, str(error)
