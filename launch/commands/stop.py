"""`muster stop`: ask a run's supervisor to stop it, and wait until it has; without a supervisor, end what is left."""

import argparse
import json

from muster.jobs.basics.errors import UsageError
from muster.jobs.runfolder.rundir import find_run, runs_root
from muster.launch.common import options
from muster.launch.submit.stopping import stop


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster stop`."""
    options.add_run(parser)
    parser.add_argument("--grace", metavar="S", type=float, help="seconds between TERM and KILL (default: the job's)")
    parser.add_argument("--now", action="store_true", help="KILL at once, without TERM and without saving first")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Stop a run and wait until it has ended."""
    if args.grace is not None and not args.grace >= 0:
        raise UsageError(f"--grace: must be at least 0 seconds, got {args.grace:g}")
    folder = find_run(runs_root(args.runs), args.run)
    outcome = stop(folder, grace_s=args.grace, now=args.now)
    print(json.dumps(outcome.to_json()) if args.json else outcome.sentence())
    return 0
