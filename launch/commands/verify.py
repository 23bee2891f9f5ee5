"""`muster verify JOB.yaml --steps K`: prove that the job's mode computes what one process computes."""

import argparse
import json

from muster.launch.common.options import add_job, add_json, add_runs, given, whole

ENTRY = "muster.jobs.train.verify:verify_rank"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser)
    add_runs(parser)
    add_json(parser)
    steps, phrase = whole("--steps", least=1), "optimizer steps to compare (default: 3)"
    parser.add_argument("--steps", type=steps, default=3, metavar="K", help=phrase)


def run(args: argparse.Namespace) -> int:
    """Run the mode and the reference in one run, then show how they compare."""
    from muster.jobs.basics.errors import UsageError
    from muster.jobs.basics.reading import read_json
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request
    from muster.launch.submit.start import begin
    from muster.launch.supervision.console import Console

    prepared = prepare(given(args, Request)).changed(entry=ENTRY, options={"steps": args.steps})
    if prepared.context.job.kind != "train":
        raise UsageError(f"{args.job}: only a train: job can be verified, this is a {prepared.context.job.kind}: job")
    code, written = begin(prepared, Console(quiet=True)), prepared.context.run.verify
    if not written.is_file():
        return code
    record = read_json(written)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        from rich.console import Console as Screen

        from muster.launch.look.verify_view import render

        Screen().print(render(record))
    return code
