"""The output of `muster schedule` as text and as SVG: simulated schedules with the given costs."""

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
from muster.pipe.schedules.programs import Send, StepSpan
from muster.pipe.schedules.simulate import Simulated, bubble_formula, simulate
from muster.pipe.schedules.svg import svg
from muster.pipe.schedules.tables import SCHEDULES, SLICES, schedule

WIDE: Final = 160  # number of columns used if the output is not a terminal
LEAST, MOST = 1e-9, 1e9  # smallest and largest time; sums of times in this range are exact enough for a drawing
CHUNKS: Final = 2  # default number of stages per rank
MOST_ACTIONS: Final = 300_000  # maximum number of actions per step; simulating this many takes half a minute or more
COLUMNS: Final = ("schedule", "stages>", "makespan>", "bubble>", "formula>", "in flight, by rank", "what it does")
FORMULAS: Final = {  # p ranks, m micro-batches, v chunks, s slices; assumes F = I = W and instant messages
    "model": "(p - 1) / p",
    "gpipe": "(p - 1) / (m + p - 1)",
    "1f1b": "(p - 1) / (m + p - 1)",
    "interleaved": "(p - 1) / (v * m + p - 1)",
    "zb1p": "(p - 1) / (3 * m + p - 1)",
    "zbv": "(p - 1) / (6 * m + p - 1)",
    "terapipe": "(p - 1) / (s * m + p - 1)",
}
SHORT: Final = {  # conditions for these formulas: with fewer micro-batches, ranks also wait for messages
    "interleaved": lambda ranks, microbatches: microbatches >= ranks,
    "zb1p": lambda ranks, microbatches: microbatches >= ranks,
    "zbv": lambda ranks, microbatches: 4 * microbatches >= 3 * ranks,
}


@dataclass(frozen=True)
class ScheduleRequest:
    """The options of `muster schedule`. A `name` of None means every schedule; `costs` and `message` are unparsed."""

    name: str | None
    ranks: int
    microbatches: int
    chunks: int | None
    slices: int | None
    costs: str
    message: str


def all_of(asked: ScheduleRequest) -> list[tuple[Schedule, Simulated]]:
    """Build the schedules with their messages, check that they cannot deadlock, and simulate them.

    Raises:
        UsageError: if the schedule does not exist, or the numbers are invalid for it.
    """
    if asked.name is not None and asked.name not in SCHEDULES:
        raise UsageError(unknown("schedule", asked.name, tuple(SCHEDULES)))
    names = [asked.name] if asked.name else list(SCHEDULES)
    own, chunks = [SCHEDULES[name].chunks for name in names], asked.chunks or CHUNKS
    if asked.chunks and None not in own:
        raise UsageError(
            f"--chunks {asked.chunks}: the stages per rank of {asked.name} are fixed at {own[0]}; leave it out"
        )
    if asked.slices and not any(SCHEDULES[name].slices_tokens for name in names):
        raise UsageError(
            f"--slices {asked.slices}: {asked.name} does not slice sequences; leave it out, or draw terapipe"
        )
    slices = {name: (asked.slices or SLICES) if SCHEDULES[name].slices_tokens else 1 for name in names}
    actions = sum(SCHEDULES[name].actions(asked.ranks, asked.microbatches * slices[name], chunks) for name in names)
    if actions > MOST_ACTIONS:
        many = f"-p {asked.ranks} -m {asked.microbatches}: has {actions} forward and backward actions"
        raise UsageError(f"{many}, more than the limit of {MOST_ACTIONS}; lower -m or -p")
    found = []
    for name in names:
        costs = costs_of(name, asked, chunks, slices[name])
        try:
            made = schedule(name, asked.ranks, asked.microbatches, chunks=chunks, costs=costs, slices=slices[name])
            program = with_messages(made)
            check(program)
            found.append((made, simulate(program, costs)))
        except ValueError as error:
            raise UsageError(str(error)) from error
    return found


def costs_of(name: str, asked: ScheduleRequest, chunks: int, slices: int) -> Costs:
    """Parse the costs of a rank for one micro-batch, and divide them among its stages and slices."""
    words = asked.costs.split(",")
    if len(words) != 3:
        raise UsageError(f"--costs {asked.costs}: must be three times, for F, I and W, such as 1,1,1")
    share = SCHEDULES[name].stages(asked.ranks, chunks) / asked.ranks * slices
    forward, input_gradient, weight_gradient = (_seconds("--costs", asked.costs, word) / share for word in words)
    message = _seconds("--message", asked.message, asked.message) / slices
    if forward + input_gradient + weight_gradient == 0:
        raise UsageError(f"--costs {asked.costs}: at least one time must be above 0")
    return Costs(forward, input_gradient, weight_gradient, message)


def record(made: Schedule, outcome: Simulated) -> dict[str, Any]:
    """Return a schedule and its simulation as plain values; bubbles are fractions of 1."""
    chunks, parts = made.stages // made.ranks, made.stages // made.ranks * made.slices
    return {
        "schedule": made.name,
        "what": SCHEDULES[made.name].about,
        "ranks": made.ranks,
        "microbatches": made.microbatches // made.slices,
        "slices": made.slices,
        "stages": made.stages,
        "rank_of": list(made.rank_of),
        "makespan_s": outcome.makespan_s,
        "bubble": outcome.bubble,
        "bubble_without_barrier": outcome.bubble_without_barrier,
        "bubble_formula": bubble_formula(
            made.name, made.ranks, made.microbatches, chunks if SCHEDULES[made.name].chunks is None else CHUNKS
        ),
        "peak_in_flight": [peak / parts for peak in outcome.peak_in_flight],
        "actions": [[str(action) for action in row] for row in made.actions],
        "spans": _spans(outcome.spans),
        "messages": _spans(outcome.messages),
    }


def _spans(rows: tuple[tuple[StepSpan, ...], ...]) -> list[list[dict[str, Any]]]:
    return [[{"step": str(each.step), "start_s": each.start_s, "end_s": each.end_s} for each in row] for row in rows]


def bars(made: Schedule, outcome: Simulated) -> list[list[Bar]]:
    """Return the bars to draw: each rank's actions, and the messages on their way to it."""
    rows = [[bar(span.step, span.start_s, span.end_s, made.rank_of) for span in row] for row in outcome.spans]
    for row in outcome.messages:
        for span in row:
            send = span.step
            if isinstance(send, Send) and span.end_s > span.start_s:
                rows[send.peer].append(Bar("receive", send.stage, send.microbatch, span.start_s, span.end_s))
    return rows


def drawing(record: dict[str, Any], made: Schedule, outcome: Simulated) -> str:
    """Draw a schedule for the terminal, with its numbers below."""
    return "\n".join(
        [
            on_screen(bars(made, outcome), wide=WIDE),
            "",
            f"{made.name}: {record['what']}; {sizes(made)}",
            f"makespan   {outcome.makespan_s:.6g}",
            f"bubble     {bubbles(record)}",
            f"in flight  at most {_numbers(record['peak_in_flight'])} micro-batches, by rank",
        ]
    )


def sizes(made: Schedule) -> str:
    """Format the numbers of ranks and micro-batches of a schedule."""
    parts = f" of {made.slices} slices" if made.slices > 1 else ""
    return f"{counted(made.ranks, 'rank')}, {counted(made.microbatches // made.slices, 'micro-batch')}{parts}"


def bubbles(record: dict[str, Any]) -> str:
    """Format the bubble as simulated, by the formula and, if it differs, without a barrier between steps."""
    name = record["schedule"]
    holds = name not in SHORT or SHORT[name](record["ranks"], record["microbatches"])
    by = FORMULAS[name] if holds else "the formula for so few micro-batches"
    parts = [f"{_percent(record['bubble'])} simulated", f"{_percent(record['bubble_formula'])} by {by}"]
    if _percent(record["bubble_without_barrier"]) != _percent(record["bubble"]):
        parts.append(f"{_percent(record['bubble_without_barrier'])} without a barrier between steps")
    return ", ".join(parts)


def comparison(records: list[dict[str, Any]]) -> str:
    """Format all schedules as a table."""
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
        raise UsageError(f"{flag} {whole}: {word.strip() or 'nothing'} is not a time; expected {wanted}")
    return seconds
