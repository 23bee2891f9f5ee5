"""`muster bench`: measure what the network can do, and look at, compare, draw and fit what came of it."""

import argparse
from typing import Final

from muster.launch.bench.choices import add_measuring
from muster.launch.bench.words import add_choices

# A first word that is one of these is a command of its own; anything else is measured.
WITHIN: Final = {
    "model": ("muster.launch.bench.model", "time models alone: forward, backward or whole steps, with peak memory"),
    "show": ("muster.launch.bench.showing", "print results again: of runs, or of result files"),
    "compare": (
        "muster.launch.bench.comparing",
        "say of every row of two results whether it is better, worse or the same",
    ),
    "plot": ("muster.launch.bench.plotting", "draw results into a PNG, SVG or PDF"),
    "fit": ("muster.launch.bench.fitting", "fit the cost model to results, and save it as the profile of a cluster"),
}
EPILOG: Final = f"""\
muster bench {" | ".join(WITHIN)} have options of their own: muster bench compare --help.
The exit code is that of the first world that failed; 1 where a value was wrong, or an operation crashed or stalled.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "what", metavar="WHAT", nargs="*", help="a job file, or operations: all_reduce,broadcast, or all, or ours"
    )
    add_choices(parser)
    results = add_measuring(parser)
    results.add_argument("--plot", metavar="FILE", help="draw busbw and time against size: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    """Measure every world of the grid, then show the result."""
    from muster.launch.bench.measuring import measure

    return measure(args)
