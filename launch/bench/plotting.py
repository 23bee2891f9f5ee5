"""`muster bench plot R... --output FILE`: plot busbw and time against size, or times of models, from runs or files."""

import argparse
from pathlib import Path

from muster.launch.bench import choices, results
from muster.launch.bench.showing import add_results


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_results(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the file: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    """Draw the plot."""
    choices.check_output("--output", args.output, choices.PLOTS)
    results.read(args.results, args.runs).plot(Path(args.output), flag="--output")
    return 0
