"""`muster plot KIND RUN|SWEEP...`: a plot of several runs, or its numbers as a table."""

import argparse
import json
from typing import TYPE_CHECKING, Final

from muster.launch.common import options
from muster.launch.sweeps.rows import chosen_rows, configure_rows

if TYPE_CHECKING:
    from muster.launch.look.comparison import RunRow
    from muster.launch.look.plots.series import Plot

ABOUT: Final = {
    "split_time": "the parts of a step's time, as stacked bars",
    "throughput": "samples or tokens per second of all ranks, as bars",
    "scaling": "rate against ranks for each mode, with the ideal line and the efficiency",
    "loss": "loss against step, including warm-up",
    "loss_time": "loss against seconds since the start of the first step",
    "memory": "peak memory of the fullest rank, measured and predicted",
    "timeline": "computation and communication in the newest recorded step of each run",
}
EPILOG: Final = "\n".join(
    [
        *(f"{kind:12}{about}" for kind, about in ABOUT.items()),
        "",
        "muster plot split_time ddp-2026 zero1-2026=ours --output time.png    the second row is named ours",
        "muster plot scaling sweep-vgg11                                      print the numbers as a table",
        "Runs with the same name count as repeats and form one row with error bars.",
    ]
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.add_argument("kind", metavar="KIND", choices=[*ABOUT], help=", ".join(ABOUT))
    configure_rows(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="draw the plot into this file: .png, .svg or .pdf")
    options.add_json(parser)
    a_step, a_rank = options.whole("--step", least=1), options.whole("--rank", least=0)
    parser.add_argument("--step", metavar="N", type=a_step, help="timeline only: this step (default: the newest)")
    parser.add_argument("--rank", metavar="R", type=a_rank, help="timeline only: this rank, or its pipeline")


def run(args: argparse.Namespace) -> int:
    """Draw the plot, or print its numbers.

    Raises:
        UsageError: if the file cannot be written, or the rows have nothing to plot.
        RefusedError: if matplotlib is not installed.
        NotFoundError: as for `chosen_rows`.
    """
    from pathlib import Path

    from muster.jobs.basics.errors import UsageError
    from muster.jobs.measuring.figures import NothingToPlotError
    from muster.launch.bench import choices
    from muster.launch.common.screen import say
    from muster.launch.look.plots import draw, table

    choices.check_output("--output", args.output, choices.PLOTS)
    try:
        plot, rows = _of_steps(args) if args.kind == "timeline" else _of_rows(args)
        if args.output:
            draw.save(plot, Path(args.output), _command(args))
    except NothingToPlotError as error:
        raise UsageError(f"plot {args.kind}: {error}") from error
    if args.output:
        say(f"wrote {args.output}")
    if args.json:
        print(json.dumps({"plot": plot.to_json(), "rows": [row.record() for row in rows]}, indent=1))
    elif not args.output:
        print(table.render(plot))
    return 0


def _of_rows(args: argparse.Namespace) -> "tuple[Plot, list[RunRow]]":
    from muster.launch.look.memories import expected_peak
    from muster.launch.look.plots.series import LOSSES, plot_of

    if args.kind in LOSSES and args.skip is None and not args.skip_epochs:
        args.skip = 0  # show warm-up steps, because their losses are valid
    chosen = chosen_rows(args)
    formulas: dict[str, float] = {}
    if args.kind == "memory":
        peaks = {label: expected_peak(folders[0]) for label, folders in chosen.folders.items()}
        formulas = {label: peak for label, peak in peaks.items() if peak is not None}
    baseline = next(row.label for row in chosen.rows if row.verdict == "baseline") if args.baseline else None
    return plot_of(args.kind, chosen.rows, chosen.groups, baseline=baseline, formulas=formulas), chosen.rows


def _of_steps(args: argparse.Namespace) -> "tuple[Plot, list[RunRow]]":
    from muster.jobs.runfolder.rundir import runs_root
    from muster.launch.look.plots.lanes import timeline_plot
    from muster.launch.look.timelines import read_timeline
    from muster.launch.sweeps.rows import rows_of

    steps = {}
    for label, folders in rows_of(args.targets, runs_root(args.runs)).items():
        found = read_timeline(folders[0], None, args.step)
        steps[label] = found.slowest() if args.rank is None else found.of_rank(args.rank)
    return timeline_plot(steps, args.rank), []


def _command(args: argparse.Namespace) -> str:
    """Rebuild the command line from the parsed options."""
    import shlex

    from muster.launch.look.plots.series import LOSSES

    words = ["muster", "plot", args.kind, *args.targets]
    for flag in ("baseline", "skip", "skip_epochs", "step", "rank", "runs", "output"):
        value = getattr(args, flag)
        if value not in (None, 0) or (flag == "skip" and value == 0 and args.kind not in LOSSES):
            words += [f"--{flag.replace('_', '-')}", str(value)]
    return shlex.join(words)
