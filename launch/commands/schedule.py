"""`muster schedule`: draw a pipeline's step, tell its bubble beside the formula's, or compare all schedules."""

import argparse
import json
import math
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.errors import UsageError
from muster.launch.common.options import add_json

if TYPE_CHECKING:
    from muster.pipe.schedules.actions import Schedule
    from muster.pipe.schedules.costs import Costs
    from muster.pipe.schedules.draw import Bar
    from muster.pipe.schedules.programs import Span
    from muster.pipe.schedules.simulate import Simulated

WIDE: Final = 160  # columns, where the output is no terminal
LEAST, MOST = 1e-9, 1e9  # of a time: sums of such ones are exact enough to be drawn
MOST_ACTIONS: Final = 300_000  # of a step: they take half a minute or more
COLUMNS: Final = ("schedule", "stages>", "makespan>", "bubble>", "formula>", "in flight, by rank", "what it does")
FORMULAS: Final = {  # of ranks p, micro-batches m, chunks v; where F, I and W take as long, and messages no time
    "model": "(p - 1) / p",
    "gpipe": "(p - 1) / (m + p - 1)",
    "1f1b": "(p - 1) / (m + p - 1)",
    "interleaved": "(p - 1) / (v * m + p - 1)",
    "zb1p": "(p - 1) / (3 * m + p - 1)",
    "zbv": "(p - 1) / (6 * m + p - 1)",
}
SHORT: Final = {  # where these formulas hold: with fewer micro-batches a rank waits for what is on its way to it
    "interleaved": lambda ranks, microbatches: microbatches >= ranks,
    "zb1p": lambda ranks, microbatches: microbatches >= ranks,
    "zbv": lambda ranks, microbatches: 4 * microbatches >= 3 * ranks,
}
EPILOG: Final = """\
muster schedule                                       all schedules beside each other, 4 ranks and 8 micro-batches
muster schedule 1f1b -p 4 -m 8                        one of them, drawn
muster schedule zbv -p 4 -m 8 --costs 7,6,7 --message 0.5 --svg zbv.svg
Costs are times of a rank's whole part of the model for one micro-batch: forward, gradient of its inputs, gradient of
its weights; a stage of a rank that has several takes its share of them. In flight are the micro-batches whose
activations a rank keeps at most; an activation of one of two stages counts half. The formula knows no costs.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", metavar="NAME", nargs="?", help="a schedule (default: compare all)")
    parser.add_argument("-p", "--ranks", metavar="P", type=int, default=4, help="ranks of the pipeline (default: 4)")
    parser.add_argument(
        "-m", "--microbatches", metavar="M", type=int, default=8, help="micro-batches of a step (default: 8)"
    )
    parser.add_argument("--chunks", metavar="V", type=int, help="stages a rank has, of interleaved (default: 2)")
    parser.add_argument("--costs", metavar="F,I,W", default="1,1,1", help="times of a rank (default: 1,1,1)")
    parser.add_argument("--message", metavar="S", default="0", help="time of a message between ranks (default: 0)")
    parser.add_argument("--svg", metavar="FILE", help="draw it into a file, too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Draw one schedule, or compare all.

    Raises:
        UsageError: no such schedule, or numbers that make none.
        RunFolderError: the file cannot be written.
    """
    from muster.launch.look import drawings
    from muster.pipe.schedules.tables import SCHEDULES

    names = [args.name] if args.name else list(SCHEDULES)
    require(args, names)
    args.chunks = args.chunks or 2
    shown = [simulated(name, args) for name in names]
    records = [record(args, *each) for each in shown]
    if args.svg:
        drawings.write(args.svg, picture(records[0], *shown[0]))
    if args.json:
        print(json.dumps(records[0] if args.name else records))
    elif args.name:
        print(drawing(records[0], *shown[0]))
    else:
        print(comparison(records))
    return 0


def require(args: argparse.Namespace, names: list[str]) -> None:
    """Raise UsageError unless the options can be, and go together."""
    from muster.pipe.schedules.tables import SCHEDULES

    for flag, number in (("-p", args.ranks), ("-m", args.microbatches), ("--chunks", args.chunks)):
        if number is not None and number < 1:
            raise UsageError(f"{flag} {number}: must be a whole number from 1")
    if args.name is not None and args.name not in SCHEDULES:
        raise UsageError(f"unknown schedule {args.name!r}; {_near(args.name, list(SCHEDULES))}")
    if args.name is None and args.svg:
        raise UsageError(f"--svg {args.svg}: draws one schedule; name one of {', '.join(SCHEDULES)}")
    own = [SCHEDULES[name].chunks for name in names]
    if args.chunks and None not in own:
        raise UsageError(
            f"--chunks {args.chunks}: {args.name} has its own number of stages a rank, {own[0]}; leave it out"
        )
    actions = sum(SCHEDULES[name].actions(args.ranks, args.microbatches, args.chunks or 2) for name in names)
    if actions > MOST_ACTIONS:
        many = f"-p {args.ranks} -m {args.microbatches}: make {actions} forwards and backwards"
        raise UsageError(f"{many}; {MOST_ACTIONS} at most are drawn: lower -m, or -p")


def simulated(name: str, args: argparse.Namespace) -> "tuple[Schedule, Simulated]":
    """Make a schedule with its messages, prove that it runs, and run it on a clock of its own."""
    from muster.pipe.schedules.checks import check
    from muster.pipe.schedules.messages import with_messages
    from muster.pipe.schedules.simulate import simulate
    from muster.pipe.schedules.tables import schedule

    costs = costs_of(name, args)
    try:
        made = schedule(name, args.ranks, args.microbatches, chunks=args.chunks, costs=costs)
        program = with_messages(made)
        check(program)
        return made, simulate(program, costs)
    except ValueError as error:
        raise UsageError(str(error)) from error


def costs_of(name: str, args: argparse.Namespace) -> "Costs":
    """Read the costs of a rank, and share them out among its stages."""
    from muster.pipe.schedules.costs import Costs
    from muster.pipe.schedules.tables import SCHEDULES

    words = args.costs.split(",")
    if len(words) != 3:
        raise UsageError(f"--costs {args.costs}: wanted three times, of F, I and W, such as 1,1,1")
    chunks = SCHEDULES[name].stages(args.ranks, args.chunks) / args.ranks
    forward, input_gradient, weight_gradient = (_seconds("--costs", args.costs, word) / chunks for word in words)
    message = _seconds("--message", args.message, args.message)
    if forward + input_gradient + weight_gradient == 0:
        raise UsageError(f"--costs {args.costs}: one of them at least must take time")
    return Costs(forward, input_gradient, weight_gradient, message)


def record(args: argparse.Namespace, made: "Schedule", outcome: "Simulated") -> dict[str, Any]:
    """Return a schedule and what came of it as plain values; shares are of 1."""
    from muster.pipe.schedules.simulate import bubble_formula
    from muster.pipe.schedules.tables import SCHEDULES

    chunks = made.stages // made.ranks
    return {
        "schedule": made.name,
        "what": SCHEDULES[made.name].about,
        "ranks": made.ranks,
        "microbatches": made.microbatches,
        "stages": made.stages,
        "rank_of": list(made.rank_of),
        "makespan_s": outcome.makespan_s,
        "bubble": outcome.bubble,
        "bubble_without_barrier": outcome.bubble_without_barrier,
        "bubble_formula": bubble_formula(made.name, made.ranks, made.microbatches, args.chunks),
        "peak_in_flight": [peak / chunks for peak in outcome.peak_in_flight],
        "actions": [[str(action) for action in row] for row in made.actions],
        "spans": _spans(outcome.spans),
        "messages": _spans(outcome.messages),
    }


def _spans(rows: "tuple[tuple[Span, ...], ...]") -> list[list[dict[str, Any]]]:
    return [[{"step": str(each.step), "start_s": each.start_s, "end_s": each.end_s} for each in row] for row in rows]


def bars(made: "Schedule", outcome: "Simulated") -> "list[list[Bar]]":
    """Return what is drawn: actions, and what is under way to a rank, which is what an idle rank waits for."""
    from muster.pipe.schedules.draw import Bar, bar
    from muster.pipe.schedules.programs import Send

    rows = [[bar(span.step, span.start_s, span.end_s, made.rank_of) for span in row] for row in outcome.spans]
    for row in outcome.messages:
        for span in row:
            send = span.step
            if isinstance(send, Send) and span.end_s > span.start_s:
                rows[send.peer].append(Bar("receive", send.stage, send.microbatch, span.start_s, span.end_s))
    return rows


def drawing(record: dict[str, Any], made: "Schedule", outcome: "Simulated") -> str:
    """Draw a schedule for the terminal, its numbers below."""
    from muster.launch.look import drawings

    return "\n".join(
        [
            drawings.on_screen(bars(made, outcome), wide=WIDE),
            "",
            f"{made.name}: {record['what']}; {sizes(made)}",
            f"makespan   {outcome.makespan_s:.6g}",
            f"bubble     {bubbles(record)}",
            f"in flight  {_numbers(record['peak_in_flight'])} micro-batches at most, by rank",
        ]
    )


def sizes(made: "Schedule") -> str:
    """Say of how many ranks and micro-batches a schedule is."""
    counts = ((made.ranks, "rank"), (made.microbatches, "micro-batch"))
    words = (f"{count} {one}{'' if count == 1 else 'es' if one.endswith('h') else 's'}" for count, one in counts)
    return ", ".join(words)


def bubbles(record: dict[str, Any]) -> str:
    """Tell a schedule's bubble: simulated, by the formula, and where it differs, of steps that follow each other."""
    name = record["schedule"]
    holds = name not in SHORT or SHORT[name](record["ranks"], record["microbatches"])
    by = FORMULAS[name] if holds else "the formula for so few micro-batches"
    parts = [f"{_percent(record['bubble'])} simulated", f"{_percent(record['bubble_formula'])} by {by}"]
    if _percent(record["bubble_without_barrier"]) != _percent(record["bubble"]):
        parts.append(f"{_percent(record['bubble_without_barrier'])} where steps follow each other without a barrier")
    return ", ".join(parts)


def comparison(records: list[dict[str, Any]]) -> str:
    """Lay all schedules out as a table."""
    from muster.launch.common import screen

    rows = [
        (
            each["schedule"],
            each["stages"],
            f"{each['makespan_s']:.6g}",
            _percent(each["bubble"]),
            _percent(each["bubble_formula"]),
            _numbers(each["peak_in_flight"]),
            each["what"],
        )
        for each in records
    ]
    return screen.table(COLUMNS, rows)


def picture(record: dict[str, Any], made: "Schedule", outcome: "Simulated") -> str:
    """Draw a schedule as SVG."""
    from muster.pipe.schedules.svg import svg

    return svg(
        bars(made, outcome),
        title=f"{made.name}: {sizes(made)}",
        subtitle=f"makespan {outcome.makespan_s:.6g}, bubble {bubbles(record)}",
        unit="",
    )


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(flag: str, whole: str, word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not (seconds == 0 or LEAST <= seconds <= MOST):
        wanted = f"0, or a number from {LEAST:g} to {MOST:g}"
        raise UsageError(f"{flag} {whole}: {word.strip() or 'nothing'} is no time; wanted {wanted}")
    return seconds


def _near(name: str, names: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"wanted one of {', '.join(names)}"
