"""`muster check JOB.yaml`: a check of every node within 10 s, one row per node, without starting the job.

If all nodes have GPUs, an NCCL smoke test between two of them follows.
"""

import argparse

from muster.launch.common.options import add_json, add_request, given


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "muster check job.yaml -H hosts.txt             one row for each node\n"
        "muster check job.yaml -H hosts.txt --smoke     and an all-reduce between two of them, also without GPUs"
    )
    add_request(parser)
    parser.add_argument(
        "--smoke",
        action=argparse.BooleanOptionalAction,
        help="exchange data between two nodes, and show the network used (default: if all nodes have GPUs)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check all nodes and print the report; return 0, 69 if a node cannot be reached, or 78 for other problems.

    Raises:
        MusterError: if `muster run` would refuse the job.
    """
    from muster.launch.check.report import check
    from muster.launch.submit.request import Request

    return check(given(args, Request), as_json=args.json, smoke=args.smoke)
