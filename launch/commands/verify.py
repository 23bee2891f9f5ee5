"""`muster verify JOB.yaml --steps K`: a check that the job's mode computes the same result as a single process.

With `--with FILE.py:CLASS`, a user's class replaces the mode, and each of its properties is tested.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import RefusedError, UsageError
from muster.launch.common.options import add_job, add_json, add_runs, add_transport, given, whole

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job

ENTRY: Final = "muster.jobs.train.verify:verify_rank"
PROVE: Final = "muster.jobs.train.proving.run:prove_rank"
KINDS: Final = ("wrapper", "optimizer", "sharded", "pipeline")
SILENT_S: Final = 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "muster verify job.yaml --steps 5\nmuster verify job.yaml --with my_ddp.py:MyDDP"
    add_job(parser)
    add_runs(parser)
    add_json(parser)
    steps, phrase = whole("--steps", least=1), "optimizer steps to compare (default: 3)"
    parser.add_argument("--steps", type=steps, default=3, metavar="K", help=phrase)
    own = parser.add_argument_group("your own class (docs/own-code.md)")
    own.add_argument("--with", metavar="FILE.py:CLASS", dest="cls", help="check this class instead of the job's mode")
    own.add_argument("--as", choices=KINDS, dest="kind", help="kind of the class (default: inferred from its methods)")
    own.add_argument("--args", metavar="JSON", help="keyword arguments for the class, such as '{\"depth\": 2}'")
    own.add_argument("--waive", metavar="NAMES", help="properties that may fail, separated by commas: overlap,buckets")
    add_transport(parser)


def run(args: argparse.Namespace) -> int:
    """Check the mode or the class in a run, and print the result.

    Raises:
        UsageError: if the job is not a `train:` job, or options contradict each other.
        RefusedError: if a class is checked on a single rank.
    """
    from muster.jobs.basics.reading import read_json
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request
    from muster.launch.submit.start import begin
    from muster.launch.supervision.console import Console

    options = class_options(args)
    prepared = prepare(given(args, Request))
    if prepared.context.job.kind != "train":
        raise UsageError(f"{args.job}: is a {prepared.context.job.kind}: job; only train: jobs can be verified")
    if options:
        options["silent_s"] = prepared.context.job.hang_s or SILENT_S
        if prepared.context.placement.world_size < 2:
            raise RefusedError("--with: needs at least two ranks; run the job with -n 2")
    entry = PROVE if options else ENTRY
    prepared = prepared.changed(entry=entry, options={"steps": args.steps, **options}, job=once(prepared.context.job))
    code, written = begin(prepared, Console(quiet=True)), prepared.context.run.verify
    if not written.is_file():
        return code
    record = read_json(written)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        from rich.console import Console as Screen

        from muster.launch.look import proof_view, verify_view

        Screen().print(proof_view.render(record) if options else verify_view.render(record))
    return code


def once(job: "Job") -> "Job":
    """Return the job without restarts, because a failed comparison would fail again."""
    return job.model_copy(update={"restart": None})


def class_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the ranks receive about a user's class; {} without `--with`.

    Raises:
        UsageError: if an option is malformed or has no effect.
    """
    from muster.jobs.basics.words import did_you_mean
    from muster.jobs.user.code import split
    from muster.jobs.user.properties import TITLES

    if args.cls is None:
        for name, value in (("--as", args.kind), ("--args", args.args), ("--waive", args.waive)):
            if value is not None:
                raise UsageError(f"{name}: applies only to your own class; add --with FILE.py:CLASS, or leave it out")
        return {}
    try:
        split(args.cls)
    except ValueError as error:
        raise UsageError(f"--with: {error}") from error
    waived = [name for name in (args.waive or "").split(",") if name]
    for name in waived:
        if name not in TITLES:
            raise UsageError(f"--waive: there is no property {name}{did_you_mean(name, TITLES)}: {', '.join(TITLES)}")
    return {"with": args.cls, "as": args.kind, "args": class_args(args.args), "waive": waived}


def class_args(text: str | None) -> dict[str, Any]:
    """Parse the value of `--args`.

    Raises:
        UsageError: if `text` is not a JSON object.
    """
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UsageError(f"--args: is not valid JSON: {error}; write it as '{{\"depth\": 2}}'") from error
    if not isinstance(found, dict):
        raise UsageError(f"--args: must be a JSON object such as '{{\"depth\": 2}}', got {text}")
    return found
