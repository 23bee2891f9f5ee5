"""`muster stop`: stop a run through its supervisor or, if that is gone, end the leftover processes of the run."""

import argparse
import json

from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import find_run, runs_root
from muster.launch.common import options
from muster.launch.submit.stopping import stop
from muster.launch.sweeps.sweep import named_sweep
from muster.launch.sweeps.sweep_stop import stop_sweep


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `muster stop`."""
    options.add_run(parser)
    parser.epilog = "muster stop RUN\nmuster stop sweep-vgg11    stop the runs of a sweep and start no further ones"
    parser.add_argument("--grace", metavar="S", type=float, help="seconds between TERM and KILL (default: the job's)")
    parser.add_argument("--now", action="store_true", help="send KILL immediately, without TERM and without saving")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Stop a run and wait until it has ended."""
    if args.grace is not None and not args.grace >= 0:
        raise UsageError(f"--grace: must be at least 0 seconds, got {args.grace:g}")
    root = runs_root(args.runs)
    if (sweep := named_sweep(root, args.run)) is None:
        outcome = stop(find_run(root, args.run, unique=True), grace_s=args.grace, now=args.now)
        print(json.dumps(outcome.to_json()) if args.json else outcome.sentence())
        return 0
    outcomes = stop_sweep(sweep, grace_s=args.grace, now=args.now)
    for each in () if args.json else outcomes:
        print(each.sentence())
    stopped = sum(not each.was_over for each in outcomes)
    found = {"sweep": sweep.name, "stopped": stopped, "runs": [each.to_json() for each in outcomes]}
    print(json.dumps(found) if args.json else f"{sweep.name}: stopped {counted(stopped, 'run')}; no further run starts")
    return 0
