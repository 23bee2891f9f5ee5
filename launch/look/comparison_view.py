"""A comparison of runs as a table on a screen, as CSV and as Markdown: the same numbers."""

import csv
import io
from collections.abc import Sequence
from typing import Final

from muster.launch.common import screen
from muster.launch.look.comparison import Row
from muster.launch.look.steps import PARTS

MB: Final = 1 << 20
COLUMNS: Final = (
    "run",
    "mode",
    "ranks>",
    "batch>",
    "step ms>",
    "mean>",
    "std>",
    "95 % interval",
    *(f"{part}>" for part in PARTS),
    "rate>",
    "speed-up>",
    "efficiency>",
    "peak MB>",
    "loss>",
    "loss differs by>",
    "verdict",
)
SPARE: Final = ("mean>", "std>", "loss differs by>", "peak MB>", "batch>", "loss>", "efficiency>", "data>", "idle>")
LEGEND: Final = """\
step ms: median of a step's time, which is that of its slowest rank. Parts: mean milliseconds and share of a step, the
mean of the ranks; communication: what ranks wait for and no computation hides; idle: what is left of the step."""


def table(rows: Sequence[Row]) -> str:
    """Render the rows, what was left out, and why there is no verdict."""
    text = screen.table(COLUMNS, (cells(row) for row in rows), spare=SPARE)
    return "\n".join([text, "", *notes(rows), LEGEND])


def notes(rows: Sequence[Row]) -> list[str]:
    """Say how much warm-up was left out, over what the intervals are, and why a row has no verdict."""
    skipped = ", ".join(f"{row.label} {row.skipped}" for row in rows)
    lines = [f"warm-up left out, in steps: {skipped} (--skip and --skip-epochs say otherwise)"]
    if any(len(row.run_ids) == 1 for row in rows):
        lines.append("an interval of one run is over its steps: it says nothing of how much another run would differ")
    whys = {row.why: [each.label for each in rows if each.why == row.why] for row in rows if row.why}
    return lines + [f"{', '.join(labels)}: {why}" for why, labels in whys.items()]


def cells(row: Row) -> list[str | None]:
    """Return the columns of a row as text."""
    return [
        row.label,
        row.mode,
        str(row.ranks),
        None if row.batch is None else str(row.batch),
        _ms(row.median_s),
        _ms(row.mean_s),
        _ms(row.std_s),
        f"{_ms(row.low_s)} to {_ms(row.high_s)}",
        *(f"{_ms(row.parts_s[part])} {row.parts_s[part] / row.mean_s:3.0%}" for part in PARTS),
        f"{row.rate:,.0f} {row.unit}",
        None if row.speedup is None else f"{row.speedup:.2f}",
        None if row.efficiency is None else f"{row.efficiency:.2f}",
        None if row.peak_bytes is None else f"{row.peak_bytes / MB:,.0f}",
        None if row.final_loss is None else f"{row.final_loss:.4f}",
        None if row.loss_difference is None else f"{row.loss_difference:.1e}",
        row.verdict,
    ]


def as_csv(rows: Sequence[Row]) -> str:
    """Write the records of the rows, a line each."""
    records = [_flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def as_markdown(rows: Sequence[Row]) -> str:
    """Write the table for a page."""
    head = [name.rstrip(">") for name in COLUMNS]
    rules = ["--:" if name.endswith(">") else "---" for name in COLUMNS]
    lines = [head, rules, *([each or "-" for each in cells(row)] for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _flat(row: Row) -> dict[str, object]:
    record = row.record()
    parts = record.pop("parts_s")
    return {**record, "run_ids": " ".join(row.run_ids), **{f"{part}_s": seconds for part, seconds in parts.items()}}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
