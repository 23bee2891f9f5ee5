"""`muster bench plot R... --output FILE`: a plot of busbw and time against size, or of the times of models."""

import argparse
from pathlib import Path

from muster.launch.bench import choices, results
from muster.launch.bench.showing import add_results


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_results(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to draw: .png, .svg or .pdf")
    parser.add_argument(
        "--over", choices=("size", "ranks"), default="size", help="the horizontal axis: sizes, or numbers of ranks"
    )


def run(args: argparse.Namespace) -> int:
    """Draw the plot."""
    choices.check_output("--output", args.output, choices.PLOTS)
    results.read(args.results, args.runs).plot(Path(args.output), flag="--output", over_ranks=args.over == "ranks")
    return 0
