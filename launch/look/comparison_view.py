"""The output of `muster compare`: a table for the terminal, CSV, or Markdown."""

import csv
import io
from collections.abc import Sequence
from typing import Final

from muster.launch.common import screen
from muster.launch.look.comparison import RunRow
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
step ms: median time of a step (of its slowest rank). data to idle: mean milliseconds per step over the ranks, and the
share of the step; communication: only the part that no computation hides; idle: the rest of the step."""


def table(rows: Sequence[RunRow]) -> str:
    """Format the rows, followed by notes on skipped steps, missing verdicts and stragglers."""
    text = screen.table(COLUMNS, (cells(row) for row in rows), spare=SPARE)
    return "\n".join([text, "", *notes(rows), LEGEND])


def notes(rows: Sequence[RunRow]) -> list[str]:
    """Return notes on skipped warm-up steps, on intervals of single runs, on missing verdicts, and on stragglers."""
    skipped = ", ".join(f"{row.label} {row.skipped}" for row in rows)
    lines = [f"warm-up steps left out: {skipped} (change with --skip or --skip-epochs)"]
    if any(len(row.run_ids) == 1 for row in rows):
        lines.append("the interval of a single run is over its steps; another run may differ by more")
    whys = {row.why: [each.label for each in rows if each.why == row.why] for row in rows if row.why}
    lines += [f"{', '.join(labels)}: {why}" for why, labels in whys.items()]
    return lines + [f"{row.label}: slow: {each}" for row in rows for each in row.slow]


def cells(row: RunRow) -> list[str | None]:
    """Return the table cells of a row."""
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


def as_csv(rows: Sequence[RunRow]) -> str:
    """Format the rows as CSV, one line per row."""
    records = [_flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def as_markdown(rows: Sequence[RunRow]) -> str:
    """Format the rows as a Markdown table."""
    head = [name.rstrip(">") for name in COLUMNS]
    rules = ["--:" if name.endswith(">") else "---" for name in COLUMNS]
    lines = [head, rules, *([each or "-" for each in cells(row)] for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def _flat(row: RunRow) -> dict[str, object]:
    record = row.record()
    parts = record.pop("parts_s")
    texts = {"run_ids": " ".join(row.run_ids), "slow": "; ".join(row.slow)}
    return {**record, **texts, **{f"{part}_s": seconds for part, seconds in parts.items()}}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
