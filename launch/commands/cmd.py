"""`muster cmd JOB.yaml --node K`: the line to paste on node K, to start a run by hand; in any order."""

import argparse
import json
from pathlib import Path

from launch.options import add_hosts, add_job, add_json, add_network, add_runs


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_job(parser)
    add_runs(parser)
    add_json(parser)
    add_hosts(parser)
    add_network(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--node", type=int, metavar="K", help="print the line for this node")
    which.add_argument("--all", action="store_true", help="print the lines for all nodes")
    parser.set_defaults(on="hand")


def run(args: argparse.Namespace) -> int:
    """Print one line per node asked for."""
    from jobs.errors import UsageError
    from launch.submit.byhand import lines
    from launch.submit.prepare import overrides, prepare

    prepared = prepare(args, here=False)  # the lines are for other machines
    count = len(prepared.context.crew)
    if args.node is not None and not 0 <= args.node < count:
        raise UsageError(f"--node: this job has nodes 0 to {count - 1}, got {args.node}")
    words = [str(Path(args.job).absolute())]
    words += [word for override in overrides(args) for word in ("--set", override)]
    words += ["--site", str(Path(args.site).absolute())] if args.site else []
    found = lines(prepared, words)
    nodes = range(count) if args.all else [args.node]
    if args.json:
        print(json.dumps([{"node": node, "line": found[node]} for node in nodes], indent=2))
    else:
        print("\n".join(found[node] for node in nodes))
    return 0
