"""`muster bench`: measure collective operations, and show, compare, plot and fit the results."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from muster.launch.bench import words
from muster.launch.bench.choices import Output, add_measuring
from muster.launch.bench.words import add_choices
from muster.launch.common.options import given

if TYPE_CHECKING:
    from muster.launch.bench.grid import BenchGrid

# Subcommands. Any other first word names operations or a job file to measure.
WITHIN: Final = {
    "model": ("muster.launch.bench.model", "time models alone: forward, backward or whole steps, with peak memory"),
    "show": ("muster.launch.bench.showing", "print the results of runs or result files again"),
    "compare": (
        "muster.launch.bench.comparing",
        "compare two results row by row: better, worse or the same",
    ),
    "plot": ("muster.launch.bench.plotting", "plot results as PNG, SVG or PDF"),
    "fit": ("muster.launch.bench.fitting", "fit the cost model to results, and save it as the profile of a cluster"),
}
EPILOG: Final = f"""\
muster bench {" | ".join(WITHIN)} have options of their own: muster bench compare --help.
The exit code is that of the first world that failed, or 1 if a result was wrong or an operation crashed or stalled.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="*",
        help="a job file, or operations such as all_reduce,broadcast; all: all of the library; ours: Muster's own",
    )
    add_choices(parser)
    add_measuring(parser, plot="busbw and time against size")


def run(args: argparse.Namespace) -> int:
    """Measure every world of the grid, then show the result."""
    from muster.launch.bench.grid import check, prepare_worlds
    from muster.launch.bench.live import CollectivesView
    from muster.launch.bench.measuring import measure

    grid, output = grid_of(args), given(args, Output)
    check(grid, output)
    return measure(prepare_worlds(grid), CollectivesView, output)


def grid_of(args: argparse.Namespace) -> "BenchGrid":
    """Return the grid that the command line describes. Errors as for `words.settings` and `words.worlds`."""
    from muster.launch.bench.grid import BenchGrid
    from muster.launch.submit.request import Request

    worlds = words.worlds(args.nodes, args.ranks_per_node)
    request = replace(given(args, Request), nodes=None, ranks_per_node=None)
    return BenchGrid(",".join(args.what), words.settings(vars(args)), worlds, request)
