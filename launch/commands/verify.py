"""`muster verify JOB.yaml --steps K`: prove that the job's mode computes what one process computes."""

import argparse
import json
from dataclasses import replace

from muster.launch.common.options import add_job, add_json, add_runs

ENTRY = "muster.jobs.train.verify:verify_rank"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser)
    add_runs(parser)
    add_json(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps to compare (default: 3)")


def run(args: argparse.Namespace) -> int:
    """Run the mode and the reference in one run, then show how they compare."""
    from muster.jobs.basics.errors import UsageError
    from muster.jobs.basics.reading import read_json
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.start import start

    if args.steps < 1:
        raise UsageError(f"--steps: must be at least 1, got {args.steps}")
    prepared = prepare(args)
    if prepared.context.job.kind != "train":
        raise UsageError(f"{args.job}: only a train: job can be verified, this is a {prepared.context.job.kind}: job")
    context = replace(prepared.context, entry=ENTRY, options={"steps": args.steps})
    submission = replace(prepared.submission, context=context)
    verdict = start(replace(prepared, submission=submission), quiet=True)
    if not context.run.verify.is_file():
        return verdict.code
    record = read_json(context.run.verify)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        from rich.console import Console

        from muster.launch.look.verify_view import render

        Console().print(render(record))
    return verdict.code
