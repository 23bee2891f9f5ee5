"""`muster schedule` on a screen and as SVG: schedules that are simulated with the costs that are asked for."""

import math
from dataclasses import dataclass
from typing import Any, Final

from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import counted, unknown
from muster.launch.common import screen
from muster.launch.look.drawings import on_screen
from muster.pipe.schedules.actions import Schedule
from muster.pipe.schedules.checks import check
from muster.pipe.schedules.costs import Costs
from muster.pipe.schedules.draw import Bar, bar
from muster.pipe.schedules.messages import with_messages
from muster.pipe.schedules.programs import Send, Span
from muster.pipe.schedules.simulate import Simulated, bubble_formula, simulate
from muster.pipe.schedules.svg import svg
from muster.pipe.schedules.tables import SCHEDULES, schedule

WIDE: Final = 160  # columns, where the output is no terminal
LEAST, MOST = 1e-9, 1e9  # of a time: sums of such ones are exact enough to be drawn
CHUNKS: Final = 2  # stages a rank has, where nobody says
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


@dataclass(frozen=True)
class Asked:
    """What is to be simulated; `name` None is every schedule. Costs and message as they were written."""

    name: str | None
    ranks: int
    microbatches: int
    chunks: int | None
    costs: str
    message: str


def all_of(asked: Asked) -> list[tuple[Schedule, Simulated]]:
    """Make the schedules with their messages, prove that they run, and run them on a clock of their own.

    Raises:
        UsageError: no such schedule, or numbers that make none.
    """
    if asked.name is not None and asked.name not in SCHEDULES:
        raise UsageError(unknown("schedule", asked.name, tuple(SCHEDULES)))
    names = [asked.name] if asked.name else list(SCHEDULES)
    own, chunks = [SCHEDULES[name].chunks for name in names], asked.chunks or CHUNKS
    if asked.chunks and None not in own:
        raise UsageError(
            f"--chunks {asked.chunks}: {asked.name} has its own number of stages a rank, {own[0]}; leave it out"
        )
    actions = sum(SCHEDULES[name].actions(asked.ranks, asked.microbatches, chunks) for name in names)
    if actions > MOST_ACTIONS:
        many = f"-p {asked.ranks} -m {asked.microbatches}: make {actions} forwards and backwards"
        raise UsageError(f"{many}; {MOST_ACTIONS} at most are drawn: lower -m, or -p")
    found = []
    for name in names:
        costs = costs_of(name, asked, chunks)
        try:
            made = schedule(name, asked.ranks, asked.microbatches, chunks=chunks, costs=costs)
            program = with_messages(made)
            check(program)
            found.append((made, simulate(program, costs)))
        except ValueError as error:
            raise UsageError(str(error)) from error
    return found


def costs_of(name: str, asked: Asked, chunks: int) -> Costs:
    """Read the costs of a rank, and share them out among its stages."""
    words = asked.costs.split(",")
    if len(words) != 3:
        raise UsageError(f"--costs {asked.costs}: wanted three times, of F, I and W, such as 1,1,1")
    share = SCHEDULES[name].stages(asked.ranks, chunks) / asked.ranks
    forward, input_gradient, weight_gradient = (_seconds("--costs", asked.costs, word) / share for word in words)
    message = _seconds("--message", asked.message, asked.message)
    if forward + input_gradient + weight_gradient == 0:
        raise UsageError(f"--costs {asked.costs}: one of them at least must take time")
    return Costs(forward, input_gradient, weight_gradient, message)


def record(made: Schedule, outcome: Simulated) -> dict[str, Any]:
    """Return a schedule and what came of it as plain values; shares are of 1."""
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
        "bubble_formula": bubble_formula(
            made.name, made.ranks, made.microbatches, chunks if SCHEDULES[made.name].chunks is None else CHUNKS
        ),
        "peak_in_flight": [peak / chunks for peak in outcome.peak_in_flight],
        "actions": [[str(action) for action in row] for row in made.actions],
        "spans": _spans(outcome.spans),
        "messages": _spans(outcome.messages),
    }


def _spans(rows: tuple[tuple[Span, ...], ...]) -> list[list[dict[str, Any]]]:
    return [[{"step": str(each.step), "start_s": each.start_s, "end_s": each.end_s} for each in row] for row in rows]


def bars(made: Schedule, outcome: Simulated) -> list[list[Bar]]:
    """Return what is drawn: actions, and what is under way to a rank, which is what an idle rank waits for."""
    rows = [[bar(span.step, span.start_s, span.end_s, made.rank_of) for span in row] for row in outcome.spans]
    for row in outcome.messages:
        for span in row:
            send = span.step
            if isinstance(send, Send) and span.end_s > span.start_s:
                rows[send.peer].append(Bar("receive", send.stage, send.microbatch, span.start_s, span.end_s))
    return rows


def drawing(record: dict[str, Any], made: Schedule, outcome: Simulated) -> str:
    """Draw a schedule for the terminal, its numbers below."""
    return "\n".join(
        [
            on_screen(bars(made, outcome), wide=WIDE),
            "",
            f"{made.name}: {record['what']}; {sizes(made)}",
            f"makespan   {outcome.makespan_s:.6g}",
            f"bubble     {bubbles(record)}",
            f"in flight  {_numbers(record['peak_in_flight'])} micro-batches at most, by rank",
        ]
    )


def sizes(made: Schedule) -> str:
    """Say of how many ranks and micro-batches a schedule is."""
    return f"{counted(made.ranks, 'rank')}, {counted(made.microbatches, 'micro-batch')}"


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


def picture(record: dict[str, Any], made: Schedule, outcome: Simulated) -> str:
    """Draw a schedule as SVG."""
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
