"""`muster bench show R...`: the report of runs or result files, as printed after the measurement.

Collectives and model timings have different reports, which cannot be combined.
"""

import argparse

from muster.launch.bench import results
from muster.launch.common.options import add_json, add_runs


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_results(parser)
    add_json(parser)


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name results, and the folder of runs."""
    parser.add_argument(
        "results", metavar="RESULT", nargs="*", help="a result file, or a run by id or folder (default: the newest run)"
    )
    add_runs(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 for a bad result, as after the measurement."""
    return results.read(args.results, args.runs).show(as_json=args.json)
