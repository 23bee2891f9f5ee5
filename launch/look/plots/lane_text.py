"""A timeline as text. Each rank has a line for its activity and a line for its number of operations in progress.

rank 0  dFFFFFFFFBBBBBBBBBBBBBBBBB~~~~~~OO
        ...........1112222222333322222....
"""

import shutil
import sys
from typing import Final

from muster.launch.look.plots.lanes import LANES, LOOKS
from muster.launch.look.plots.series import Plot

WIDE: Final = 120  # number of columns used if the output is not a terminal
IDLE: Final = "."


def drawing(plot: Plot) -> str:
    """Draw the lanes on one time scale across the terminal's width, followed by a legend."""
    columns = shutil.get_terminal_size((WIDE, 24)).columns if sys.stdout.isatty() else WIDE
    heads = {lane: lane.removesuffix(f": {LANES[0]}") if lane.endswith(LANES[0]) else "" for lane in plot.lanes}
    indent = max(map(len, heads.values())) + 2
    width = max(columns - indent, 1)
    end_s = max((end for each in plot.series for end in each.high or ()), default=0.0)
    scale = width / end_s if end_s > 0 else 0.0
    cells = {lane: [IDLE] * width for lane in plot.lanes}
    changes = {lane: [0] * (width + 1) for lane in plot.lanes}
    for each in plot.series:
        for lane, start_s, stop_s in zip(map(str, each.x), each.low or (), each.high or (), strict=True):
            start, end = (min(max(round(at * scale), 0), width) for at in (start_s, stop_s))
            if each.label in LOOKS:
                cells[lane][start:end] = LOOKS[each.label].letter * (end - start)
            elif start < width:
                changes[lane][start] += 1
                changes[lane][max(end, start + 1)] -= 1
    lines = []
    for lane, head in heads.items():
        count = 0
        for column, change in enumerate(changes[lane][:-1]):
            count += change
            cells[lane][column] = str(min(count, 9)) if count else cells[lane][column]
        lines.append(f"{head:{indent}}{''.join(cells[lane])}".rstrip())
    shown = [f"{LOOKS[each.label].letter} {each.label}" for each in plot.series if each.label in LOOKS]
    under_way = [each.label for each in plot.series if each.label not in LOOKS]
    counts = [f"numbers: {' or '.join(under_way)} under way"] if under_way else []
    return "\n".join([*lines, "", ", ".join([*shown, *counts, f"{IDLE} nothing"])])
