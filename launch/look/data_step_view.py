"""`muster timeline` of data-parallel ranks, on a screen: a line for what each rank did, one for its collectives.

rank 0  dFFFFFFFFBBBBBBBBBBBBBBBBB~~~~~~OO
        ...........1112222222333322222....                how many collectives are under way
"""

import shutil
import sys
from collections.abc import Sequence
from typing import Final

from muster.launch.common import rankset, screen
from muster.launch.look.data_steps import WAIT, DataStep, RankTimes, Span
from muster.launch.look.timeline_view import WIDE, milliseconds

LETTERS: Final = {"data": "d", "forward": "F", "backward": "B", WAIT: "~", "optimizer": "O", "replay": "R"}
LEGEND: Final = (
    "d data, F forward, B backward, ~ exposed wait for communication, O optimizer, R replayed CUDA graph; "
    "below: collectives under way"
)
MOST_RANKS: Final = 16  # of one drawing
IDLE: Final = "."
COLUMNS: Final = (
    *("rank>", "data>", "forward>", "backward>", "wait>", "optimizer>"),
    *("collectives>", "MB>", "under way>", "hidden>"),
)


def drawn_ranks(step: DataStep, rank: int | None) -> Sequence[int]:
    """Return the ranks that are drawn: the one that is asked for, or the first ones."""
    return step.ranks[:MOST_RANKS] if rank is None else [rank]


def render_data(title: str, step: DataStep, rank: int | None) -> str:
    """Draw a step for the terminal, with each rank's times."""
    ranks = drawn_ranks(step, rank)
    times = {each.rank: each for each in step.by_rank()}
    clocks = f"clocks agree within {milliseconds(step.apart_s)}" if len(step.ranks) > 1 else "one clock"
    parts = [
        title,
        f"{lanes(step, ranks)}\n\n{LEGEND}",
        screen.table(COLUMNS, [line_of(times[each]) for each in ranks]),
        f"step  {milliseconds(step.seconds)}, timed by the {step.timed_by}; {clocks}",
    ]
    notes = [f"collectives are missing: {step.not_timed}"] if step.not_timed else []
    notes += [f"{step.left_out} records could not be read"] if step.left_out else []
    if rank is None and len(step.ranks) > len(ranks):
        rest = rankset.fold(step.ranks[len(ranks) :])
        notes.append(f"not drawn: ranks {rest}; --rank R draws one")
    return "\n\n".join([*parts, *notes])


def lanes(step: DataStep, ranks: Sequence[int]) -> str:
    """Draw two lines a rank on one time scale, as wide as the terminal."""
    columns = shutil.get_terminal_size((WIDE, 24)).columns if sys.stdout.isatty() else WIDE
    heads = [f"rank {rank}" for rank in ranks]
    indent = max(map(len, heads)) + 2
    own = {rank: list[Span]() for rank in ranks}
    for each in step.spans:
        if each.rank in own:
            own[each.rank].append(each)
    every = [each for spans in own.values() for each in spans]
    begin_s, end_s = min(each.start_s for each in every), max(each.end_s for each in every)
    width = max(columns - indent, 1)
    scale = width / (end_s - begin_s) if end_s > begin_s else 0.0
    lines = []
    for head, spans in zip(heads, own.values(), strict=True):
        computing, under_way = [IDLE] * width, [0] * (width + 1)
        for each in spans:
            start, end = (round((at - begin_s) * scale) for at in (each.start_s, each.end_s))
            if not each.communicates:
                computing[start:end] = LETTERS[each.kind] * (end - start)
            else:
                under_way[min(start, width - 1)] += 1
                under_way[max(end, min(start, width - 1) + 1)] -= 1
        lines += [f"{head:{indent}}{''.join(computing)}", f"{'':{indent}}{_counts(under_way[:-1])}"]
    return "\n".join(line.rstrip() for line in lines)


def line_of(times: RankTimes) -> tuple[object, ...]:
    """Return a rank's line of the table."""
    phases = times.phases_s
    computing = ("data", "forward", "backward", WAIT, "optimizer")
    hidden = f"{100 * times.hidden_s / times.under_way_s:.0f} %" if times.under_way_s else None
    return (
        times.rank,
        *(milliseconds(phases[each]) for each in computing),
        times.collectives,
        f"{times.bytes / (1 << 20):.4g}",
        milliseconds(times.under_way_s) if times.collectives else None,
        hidden,
    )


def _counts(changes: Sequence[int]) -> str:
    """Write how many collectives are under way in each column."""
    text, count = "", 0
    for change in changes:
        count += change
        text += IDLE if not count else str(min(count, 9))
    return text
