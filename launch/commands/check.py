"""`muster check JOB.yaml`: every node of the job, one row each, within 10 s, and nothing is started."""

import argparse

from muster.launch.common.options import add_json, add_request, given


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = "muster check job.yaml -H hosts.txt             one row for each node"
    add_request(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Ask all nodes, print the report; the exit code is 0, 69 when a node cannot be reached, else 78.

    Raises:
        MusterError: as `muster run` does before it starts anything.
    """
    from muster.launch.check.report import check
    from muster.launch.submit.prepare import prepare
    from muster.launch.submit.request import Request

    return check(prepare(given(args, Request)), as_json=args.json)
