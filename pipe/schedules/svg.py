"""Draw a pipeline's step as an SVG: one row per rank, colours for kinds, messages in a lane below, idle time in grey.

Bars come from `pipe/schedules/draw.py`, simulated or measured. A cell shows its micro-batch if there is room; its
tooltip has all details. A rank's later stages are paler than its first.
"""

import math
from collections.abc import Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from muster.pipe.schedules.draw import PHRASES, Bar, Rows, extent, gaps

WIDTH: Final = 1000
MARGIN: Final = 20
HEAD: Final = 24  # height of one title line
ROW: Final = 34
CELL: Final = 24  # height of the cells for actions
LANE: Final = 6  # height of the lane for messages, below the cells
GAP: Final = 8  # between two items of the legend
LETTER: Final = 6.6  # width of a digit, in pixels at 11 px
TICKS: Final = 10
PALE: Final = 0.6
UNITS: Final = {"s": 1.0, "ms": 1e3, "": 1.0}
COLOURS: Final = {
    "F": "#7aa6dc",
    "B": "#7fbf7b",
    "I": "#a9d8a0",
    "W": "#f0b05f",
    "message": "#a582c2",
    "idle": "#ededed",
}
STYLE: Final = (
    "text{font:11px sans-serif;fill:#222}.title{font-size:16px;font-weight:600}.middle{text-anchor:middle}"
    ".axis{stroke:#999;stroke-width:1}"
    + "".join(f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items() if kind != "message")
    + f".send,.receive,.message{{fill:{COLOURS['message']}}}.F,.B,.I,.W{{stroke:#fff;stroke-width:.5}}"
)


def svg(rows: Rows, *, title: str, subtitle: str = "", unit: str = "s", names: Sequence[str] = ()) -> str:
    """Draw rows as the text of an SVG file.

    Every bar with a duration is a `rect` of class `cell`; every idle interval of a rank is a `rect` of class `idle`.
    `unit`
    is the unit of the axis: `s` or `ms` for bars in seconds, or empty for times without a unit. `names` are the row
    labels (default: `rank 0` and so on).
    """
    heads = [*names] or [f"rank {rank}" for rank in range(len(rows))]
    begin_s, end_s = extent(rows)
    left = MARGIN + 10 + LETTER * max(map(len, heads), default=0)
    pixels_per_s = (WIDTH - left - MARGIN) / (end_s - begin_s) if end_s > begin_s else 0.0
    top = MARGIN + HEAD * (3 if subtitle else 2)
    bottom = top + ROW * len(rows)
    parts = [_text(MARGIN, MARGIN + 14, title, "title")]
    if subtitle:
        parts.append(_text(MARGIN, MARGIN + HEAD + 10, subtitle))
    parts += _legend(rows, top - 14)
    for index, (head, row) in enumerate(zip(heads, rows, strict=True)):
        y = top + ROW * index
        parts.append(_text(MARGIN, y + 16, head))
        for start_s, until_s in gaps(row, begin_s, end_s):
            x = left + (start_s - begin_s) * pixels_per_s
            parts.append(_rect(x, y, (until_s - start_s) * pixels_per_s, CELL, "idle"))
        for each in row:
            if each.seconds > 0:
                x = left + (each.start_s - begin_s) * pixels_per_s
                parts += _bar(each, x, y, each.seconds * pixels_per_s, _tip(each, head, begin_s, unit))
    parts += _axis(end_s - begin_s, left, bottom, pixels_per_s, unit)
    height = bottom + 2 * HEAD
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _bar(each: Bar, x: float, y: float, width: float, tip: str) -> list[str]:
    """Draw a bar, with its micro-batch if there is room, or a message in the lane below."""
    if not each.computes:
        return [_rect(x, y + CELL, width, LANE, f"cell {each.kind}", tip)]
    opacity = PALE if each.chunk else 1.0
    parts = [_rect(x, y, width, CELL, f"cell {each.kind}", tip, opacity)]
    if width > LETTER * len(said := str(each.microbatch)) + 2:
        parts.append(_text(x + width / 2, y + 16, said, "middle"))
    return parts


def _tip(each: Bar, head: str, begin_s: float, unit: str) -> str:
    """Return the tooltip of a bar."""
    start, end = ((at - begin_s) * UNITS[unit] for at in (each.start_s, each.end_s))
    what = f"{each.kind}{each.stage}.{each.microbatch}"
    if not each.computes:
        what = f"{each.kind} of micro-batch {each.microbatch} for stage {each.stage}"
    return f"{head}: {what}, {start:.6g} to {end:.6g} {unit}".rstrip()


def _legend(rows: Rows, y: float) -> list[str]:
    """Draw a coloured square and a label for every kind that occurs."""
    kinds = {each.kind for row in rows for each in row}
    shown = [(kind, phrase) for kind, phrase in PHRASES.items() if kind in kinds]
    if {"send", "receive"} & kinds:
        shown.append(("message", "message"))
    parts, x = [], float(MARGIN)
    for kind, phrase in [*shown, ("idle", "idle")]:
        parts += [_rect(x, y - 10, 12, 12, f"key {kind}"), _text(x + 16, y, phrase)]
        x += 16 + LETTER * len(phrase) + 2 * GAP
    if any(each.chunk for row in rows for each in row):
        parts.append(_text(x, y, "number: micro-batch; paler: a later stage of the rank"))
    else:
        parts.append(_text(x, y, "number: micro-batch"))
    return parts


def _axis(total_s: float, left: float, y: float, pixels_per_s: float, unit: str) -> list[str]:
    """Draw a time scale with round numbers."""
    parts = [f'<line class="axis" x1="{left:.1f}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}"/>']
    if total_s <= 0:
        return parts
    step = _round_up(total_s * UNITS[unit] / TICKS)
    for tick in range(math.floor(total_s * UNITS[unit] / step + 1e-9) + 1):
        x = left + tick * step / UNITS[unit] * pixels_per_s
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}"/>')
        parts.append(_text(x, y + 16, f"{tick * step:.6g}{' ' + unit if unit and tick == 0 else ''}", "middle"))
    return parts


def _round_up(number: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 and so on that is at least `number`."""
    power = 10.0 ** math.floor(math.log10(number))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= number * (1 - 1e-9))


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "", opacity: float = 1.0) -> str:
    pale = f' fill-opacity="{opacity}"' if opacity < 1 else ""
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    if not tip:
        return f'<rect class="{kind}" {place}{pale}/>'
    return f'<rect class="{kind}" {place}{pale}><title>{escape(tip)}</title></rect>'


def _text(x: float, y: float, said: str, kind: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}"{f" class={quoteattr(kind)}" if kind else ""}>{escape(said)}</text>'
