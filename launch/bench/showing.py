"""`muster bench show R...`: the report of runs or result files, as it was printed when they had been measured.

Collectives and timings of models have reports of their own, and are not shown as one.
"""

import argparse

from muster.launch.bench import results
from muster.launch.common.options import add_json, add_runs


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_results(parser)
    add_json(parser)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the results that a command reads, and where runs are."""
    parser.add_argument(
        "results", metavar="RESULT", nargs="*", help="a result file, or a run: its id or its folder (the newest)"
    )
    add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Print; return 1 for a bad result, as the measurement did."""
    return results.read(args.results, args.runs).show(as_json=args.json)
