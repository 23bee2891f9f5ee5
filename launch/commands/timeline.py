"""`muster timeline RUN`: draw what every rank of a pipeline did in a step, its bubble beside the simulated one."""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobs.errors import RunFolderError, UsageError
from jobs.rundir import find_run, runs_root
from launch import options

if TYPE_CHECKING:
    from launch.look.timelines import Recorded

WIDE: Final = 120  # columns, where the output is no terminal
COLUMNS: Final = ("stage>", "rank>", "forward>", "backward>", "of weights>", "message on>", "to send>", "to take>")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_run(parser)
    options.add_json(parser)
    parser.add_argument("--step", metavar="N", type=int, help="this step (default: the newest that was recorded)")
    parser.add_argument("--attempt", metavar="N", type=int, help="of this attempt (default: the newest that has it)")
    parser.add_argument("--svg", metavar="FILE", help="draw it into a file, too")


def run(args: argparse.Namespace) -> int:
    """Print one recorded step.

    Raises:
        UsageError: a number that cannot be.
        RunFolderError: nothing was recorded, or the file cannot be written.
    """
    from launch.look.timelines import read_timeline

    for flag, number, least in (("--step", args.step, 1), ("--attempt", args.attempt, 0)):
        if number is not None and number < least:
            raise UsageError(f"{flag}: must be at least {least}, got {number}")
    folder = find_run(runs_root(args.runs), args.run)
    attempt, recorded, steps = read_timeline(folder, args.attempt, args.step)
    if args.svg:
        write(Path(args.svg), picture(folder.run_id, recorded))
    if args.json:
        print(json.dumps({"run": folder.run_id, "attempt": attempt, "recorded": steps, **recorded.to_json()}))
        return 0
    print(render(folder.run_id, attempt, recorded))
    return 0


def write(path: Path, text: str) -> None:
    """Write a drawing.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {(error.strerror or 'unknown reason').lower()}") from error


def render(run_id: str, attempt: int, recorded: "Recorded") -> str:
    """Draw a step for the terminal, with its numbers and what actions took."""
    from launch.look import screen
    from pipe.schedules.draw import legend, text
    from pipe.schedules.measured import bars

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDE, 24)).columns if terminal else WIDE
    table, rows = recorded.schedule, bars(recorded.records, recorded.schedule.rank_of)
    compared = recorded.compared()
    costs, simulated_s = compared.costs, compared.simulation.makespan_s

    def of(times: float | tuple[float, ...], stage: int) -> str:
        seconds = times[stage] if isinstance(times, tuple) else times
        return f"{1e3 * seconds:.3g} ms"

    lines = [
        (
            stage,
            rank,
            of(costs.forward, stage),
            of(costs.input_gradient, stage),
            of(costs.weight_gradient, stage) if table.splits_backward else None,
            of(costs.message, stage) if stage + 1 < table.stages else None,
            of(costs.send, stage),
            of(costs.take, stage),
        )
        for stage, rank in enumerate(table.rank_of)
    ]
    return "\n".join(
        [
            f"{run_id}, attempt {attempt}, step {recorded.step}: {table.name}, {table.ranks} ranks, "
            f"{table.microbatches} micro-batches",
            "",
            text(rows, width=width, colour=terminal and "NO_COLOR" not in os.environ),
            "",
            legend(rows),
            "",
            screen.table(COLUMNS, lines),
            "",
            f"step    {1e3 * recorded.seconds:.4g} ms, {1e3 * simulated_s:.4g} ms simulated with these times",
            f"bubble  {bubbles(recorded)}",
        ]
    )


def picture(run_id: str, recorded: "Recorded") -> str:
    """Draw a step as SVG."""
    from pipe.schedules.measured import bars
    from pipe.schedules.svg import svg

    table = recorded.schedule
    return svg(
        bars(recorded.records, table.rank_of),
        title=f"{run_id}, step {recorded.step}: {table.name}, {table.ranks} ranks, {table.microbatches} micro-batches",
        subtitle=f"{1e3 * recorded.seconds:.4g} ms, bubble {bubbles(recorded)}",
        unit="ms",
    )


def bubbles(recorded: "Recorded") -> str:
    """Say the measured, the simulated and the formula's share of time in which ranks idle."""
    compared = recorded.compared()
    shares = (
        (compared.measured, "measured"),
        (compared.simulated, "simulated"),
        (recorded.bubble_formula(), "by the formula of equal stages"),
    )
    return ", ".join(f"{100 * share:.1f} % {what}" for share, what in shares)
