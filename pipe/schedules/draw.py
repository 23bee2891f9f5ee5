"""Draw a pipeline's step as text: one row per rank, from simulated or measured times. The SVG uses the same bars.

    rank 0  F0F1F2........B0--B1--B2--          gpipe, 3 ranks, 3 micro-batches, a backward of two forwards
    rank 1  ..F0F1F2....B0--B1--B2--..
    rank 2  ....F0F1F2B0--B1--B2--....

A cell begins with its kind and its micro-batch. Dots are idle time, and tildes are idle time while a message of the
rank is in transit. If ranks have two stages, the second has lower-case letters. With more stages, cells read
stage.micro-batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from muster.pipe.schedules.actions import Action
from muster.pipe.schedules.programs import Send, Step

IDLE: Final = "."
UNDER_WAY: Final = "~"
COMPUTE: Final = ("F", "B", "I", "W")
COLOURS: Final = {"F": 75, "B": 114, "I": 151, "W": 215, "message": 183}  # of a terminal's 256 colours
RESET: Final = "\x1b[0m"


@dataclass(frozen=True)
class Bar:
    """One cell of a row: an action of a rank or one of its messages, with its start and end.

    `kind` is F, B, I, W, `send` or `receive`. `chunk` numbers the stages of the rank, from 0.
    """

    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    chunk: int = 0

    @property
    def computes(self) -> bool:
        """True for actions, False for messages."""
        return self.kind in COMPUTE

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end_s - self.start_s


Rows = Sequence[Sequence[Bar]]


def bar(step: Step, start_s: float, end_s: float, rank_of: Sequence[int]) -> Bar:
    """Return the bar of an action or a message. `rank_of[stage]` is the rank that holds a stage."""
    kind = step.kind if isinstance(step, Action) else "send" if isinstance(step, Send) else "receive"
    stage = step.stage
    # A message is drawn in the rank's first chunk; `stage` is its destination.
    chunk = rank_of[:stage].count(rank_of[stage]) if isinstance(step, Action) else 0
    return Bar(kind, stage, step.microbatch, start_s, end_s, chunk)


def text(rows: Rows, *, width: int = 100, names: Sequence[str] = (), colour: bool = False) -> str:
    """Draw rows as lines of at most `width` columns, on one time scale from the first start to the last end.

    A cell too small for its label shows only its kind, and bars shorter than a column may be missing. `names` are the
    row labels (default: `rank 0` and so on). `colour` adds terminal escape codes.
    """
    heads = [*names] or [f"rank {rank}" for rank in range(len(rows))]
    indent = max(map(len, heads), default=0) + 2
    begin_s, end_s = extent(rows)
    chunks = 1 + max((each.chunk for row in rows for each in row), default=0)
    columns_per_s = _scale(rows, chunks, end_s - begin_s, max(width - indent, 1))
    total = round((end_s - begin_s) * columns_per_s)
    lines = []
    for head, row in zip(heads, rows, strict=True):
        cells = [(IDLE, "")] * total
        for each in sorted(row, key=lambda each: each.computes):  # actions are drawn over messages
            start, end = (round((at - begin_s) * columns_per_s) for at in (each.start_s, each.end_s))
            drawn = _cell(each, end - start, chunks) if each.computes else UNDER_WAY * (end - start)
            cells[start:end] = [(column, each.kind) for column in drawn]
        lines.append(f"{head:{indent}}{_joined(cells, colour)}")
    return "\n".join(lines)


def legend(rows: Rows) -> str:
    """Return a line that explains the letters that occur in the rows."""
    kinds = {each.kind for row in rows for each in row}
    phrases = [f"{kind} {phrase}" for kind, phrase in PHRASES.items() if kind in kinds]
    if any(not each.computes for row in rows for each in row):
        phrases.append(f"{UNDER_WAY} idle, a message in transit")
    chunks = 1 + max((each.chunk for row in rows for each in row), default=0)
    numbers = "number: micro-batch" if chunks <= 2 else "numbers: stage.micro-batch"
    small = ["lower case: the rank's second stage"] if chunks == 2 else []
    return ", ".join([*phrases, f"{IDLE} idle", numbers, *small])


PHRASES: Final = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}


def extent(rows: Rows) -> tuple[float, float]:
    """Return the first start and the last end of all bars; zeros if there are none."""
    every = [each for row in rows for each in row]
    return min((each.start_s for each in every), default=0.0), max((each.end_s for each in every), default=0.0)


def gaps(row: Iterable[Bar], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """List the intervals between the extent's start and end in which a rank computes nothing."""
    found, at_s = [], begin_s
    for each in sorted((each for each in row if each.computes), key=lambda each: each.start_s):
        if each.start_s > at_s:
            found.append((at_s, each.start_s))
        at_s = max(at_s, each.end_s)
    return [*found, (at_s, end_s)] if end_s > at_s else found


def label(each: Bar, chunks: int) -> str:
    """Return the label of a cell: F3; f3 on the second of two stages; F5.3 if there are more stages."""
    if chunks > 2:
        return f"{each.kind}{each.stage}.{each.microbatch}"
    return f"{each.kind if each.chunk == 0 else each.kind.lower()}{each.microbatch}"


def _scale(rows: Rows, chunks: int, total_s: float, width: int) -> float:
    """Return columns per second: enough for the shortest cell's label and a space, if the width allows."""
    computing = [each for row in rows for each in row if each.computes and each.seconds > 0]
    fitting = width / total_s if total_s > 0 else 0.0
    if not computing:
        return fitting
    shortest_s = min(each.seconds for each in computing)
    wanted = 1 + max(len(label(each, chunks)) for each in computing)
    columns_per_s = min(wanted / shortest_s, fitting)
    # If the shortest cell has a whole number of columns, cells of equal length look equal.
    columns = int(columns_per_s * shortest_s + 1e-9)
    return columns / shortest_s if columns else columns_per_s


def _cell(each: Bar, columns: int, chunks: int) -> str:
    """Return the text of a cell: its label, then dashes to its end.

    If there is room, the last column of the cell stays empty.
    """
    said = label(each, chunks)
    if len(said) > columns:
        said = said[:1][:columns]
    room = columns - len(said)
    return said + "-" * (room - 1) + " " * (room > 0)


def _joined(cells: Iterable[tuple[str, str]], colour: bool) -> str:
    """Join columns of text into one line.

    Each column comes with its kind. In colour, adjacent cells of one kind share their escape codes.
    """
    parts = []
    for kind, columns in groupby(cells, key=lambda cell: cell[1]):
        part = "".join(column for column, _ in columns)
        code = COLOURS.get(kind, COLOURS["message"])
        parts.append(f"\x1b[30;48;5;{code}m{part}{RESET}" if colour and kind else part)
    return "".join(parts).rstrip()
