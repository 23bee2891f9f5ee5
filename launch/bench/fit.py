"""`muster bench fit R... --output profile.json`: its options; `launch/bench/fitting.py` does it."""

import argparse

from muster.launch.bench import choices
from muster.launch.bench.showing import add_results
from muster.launch.common.options import add_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_results(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE.json", required=True, help="the profile that muster predict reads"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Fit, save, and print the held-out error."""
    from muster.launch.bench.fitting import run as fit

    choices.check_output("--output", args.output, (".json",))
    return fit(args)
