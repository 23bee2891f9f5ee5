"""Format timings as text: settings after `#`, names, units, fixed columns, reasons for missing numbers, a verdict.

# model           pass  precision  parameters  batch  context    first     mean      std      min      rate ...
#                                                                 (ms)     (ms)     (ms)     (ms)     (1/s) ...
  gpt-nano    forward       fp32     747,904     16      128     14.2     3.31    0.052     3.26   618,731 ...
"""

import re
from collections.abc import Sequence
from typing import Final

from muster.jobs.basics.words import counted
from muster.jobs.measuring.columns import SPREAD, Column, cells, headings, utc
from muster.jobs.measuring.compare import FOREIGN_LIMIT
from muster.jobs.measuring.launches import confidence_lines
from muster.jobs.models.shapes import GPT_SHAPES
from muster.jobs.timing.records import Dtypes, Header, Peak, State, Timed, TimingRecords, Timings
from muster.jobs.timing.rows import ModelRow, rows_of
from muster.jobs.timing.settings import TimingSettings

MB: Final = 2**20
BLOCK: Final = re.compile(r"\bblock\d+\b")
STATE_WORDS: Final[dict[State, str]] = {
    "ok": "",
    "memory": "out of memory",
    "timeout": "timeout",
    "refused": "refused",
    "failed": "failed",
}
MOST_WARM_UPS: Final = 4  # at most this many warm-up times are shown in a row


def _summary(row: ModelRow, name: str) -> str:
    return milliseconds(getattr(row.timed.summary, name, None))


LABELS: Final[tuple[Column, ...]] = (
    ("model", "", 11, lambda row: row.timed.model),
    ("pass", "", 9, lambda row: row.timed.pass_name),
    ("precision", "", 10, lambda row: row.timed.precision),
    ("parameters", "", 14, lambda row: f"{row.timed.parameters:,}"),
    ("batch", "", 6, lambda row: str(row.timed.batch)),
    ("context", "", 8, lambda row: "-" if row.timed.context is None else str(row.timed.context)),
)
NUMBERS: Final[tuple[Column, ...]] = (
    ("first", "(ms)", 9, lambda row: milliseconds(row.timed.first_s)),
    ("median", "(ms)", 9, lambda row: number(row.p50_us, 1e-3)),
    SPREAD,
    ("mean", "(ms)", 9, lambda row: _summary(row, "mean_s")),
    ("std", "(ms)", 8, lambda row: _summary(row, "std_s")),
    ("min", "(ms)", 9, lambda row: _summary(row, "min_s")),
    ("rate", "(units/s)", 10, lambda row: number(row.timed.rate)),
    ("work", "(TFLOP/s)", 10, lambda row: number(row.timed.flops_per_s, 1e-12)),
    ("matmul", "(%)", 7, lambda row: number(row.timed.matmul_share, 100)),
    ("memory", "(MB)", 9, lambda row: "-" if row.timed.peak_bytes is None else f"{row.timed.peak_bytes / MB:,.0f}"),
)


def report_lines(timings: Timings) -> list[str]:
    """Return timings as lines of text."""
    lines: list[str] = []
    for timing in timings.timings:
        lines += ["#"] if lines else []
        lines += [*heading(timing.header), *(_peak(each) for each in timing.peaks)]
        if timing.rows:
            lines += ["#", *table(rows_of(timing)), *_footer(timing), *confidence_lines(rows_of(timing))]
        for each in timing.dtypes:
            lines += ["#", *_dtypes(each)]
    return [*lines, f"# verdict: {verdict(timings)}"]


def heading(header: Header) -> list[str]:
    """Return the heading, which describes the run and the machine."""
    machine, settings = header.machine, header.settings
    place = [f"host {machine.host}", *([machine.gpu] if header.device == "cuda" else [])]
    place += [machine.cpu, f"{counted(machine.threads, 'thread')} on {counted(machine.cores, 'core')}"]
    place.append(f"{machine.memory_bytes / 2**30:.0f} GB")
    return [
        f"# {header.name}: timings of models on {header.device} · torch {header.torch} · {utc(header.time)}",
        f"# {', '.join(place)}",
        f"# {'; '.join(_asked(settings))}",
    ]


def _asked(settings: TimingSettings) -> list[str]:
    """Describe the common settings of the rows."""
    launches = f"{settings.launches} launch{'es' * (settings.launches != 1)} of each row"
    timed = f"{counted(settings.warmup, 'warm-up step')}, {counted(settings.steps, 'timed step')}"
    asked = [] if settings.dtypes else [f"{launches}: {timed}, each timed until the device has finished"]
    if any(name in GPT_SHAPES for name in settings.models()):
        head, biases = "tied" if settings.tied else "untied", "with" if settings.bias else "no"
        asked.append(f"vocabulary {settings.vocabulary:,}, {settings.norm} norm, {biases} biases, {head} head")
    asked += ["torch.compile"] if settings.compile else []
    asked += ["activation checkpointing"] if settings.activation_checkpointing else []
    return asked


def table(rows: Sequence[ModelRow]) -> list[str]:
    """Return names, units and one line for each row."""
    (name, unit, width, value), *others = LABELS
    longest = max((len(row.timed.model) for row in rows), default=0)
    labels = ((name, unit, max(width, longest + 1), value), *others)
    return [*headings((*labels, *NUMBERS), "warm-up", "(ms)"), *(_line(labels, row) for row in rows)]


def row_text(row: Timed) -> str:
    """Summarize a row: gpt-nano forward fp32: 3.31 ms +- 0.052 (first 14.2), 38 MB."""
    name = row.case.name
    if row.summary is None:
        return f"{name}: {STATE_WORDS[row.state]}: {row.reason}"
    deviation = f" +- {milliseconds(row.summary.std_s)}" if row.summary.std_s is not None else ""
    first = f" (first {milliseconds(row.first_s)})"
    memory = f", {row.peak_bytes / MB:,.0f} MB" if row.peak_bytes is not None else ""
    reason = f"; {STATE_WORDS[row.state]}: {row.reason}" if row.state != "ok" else ""
    return f"{name}: {milliseconds(row.summary.mean_s)} ms{deviation}{first}{memory}{reason}"


def verdict(timings: Timings) -> str:
    """Return FAILED if something failed or nothing was timed, UNFINISHED if rows are missing, else OK."""
    rows = [row for timing in timings.timings for row in timing.rows]
    tables = [each for timing in timings.timings for each in timing.dtypes]
    if any(row.state == "failed" for row in rows):
        return "FAILED"
    if not tables and not any(row.summary is not None for row in rows):
        return "FAILED (nothing was timed)"
    return "OK" if all(timing.is_over for timing in timings.timings) else "UNFINISHED"


def number(value: float | None, unit: float = 1.0) -> str:
    """Format a value times `unit` with three digits, without exponent; None as `-`."""
    if value is None:
        return "-"
    value *= unit
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4}f}"


def milliseconds(seconds: float | None) -> str:
    """Format a time in milliseconds; None as `-`."""
    return number(seconds, 1e3)


def _line(labels: Sequence[Column], measured: ModelRow) -> str:
    row, start = measured.timed, cells(labels, measured)
    reason = f"{STATE_WORDS[row.state]}: {row.reason}" if row.state != "ok" else ""
    if row.summary is None:
        return f"{start}  {reason}"
    warm_up = " ".join(milliseconds(each) for each in row.warm_up_s[:MOST_WARM_UPS]) or "-"
    more = f" … {len(row.warm_up_s)} in all" if len(row.warm_up_s) > MOST_WARM_UPS else ""
    return f"{start}{cells(NUMBERS, measured)}  {warm_up}{more}{f'  {reason}' if reason else ''}"


def _footer(timing: TimingRecords) -> list[str]:
    """Return lines that describe the effect of the warm-up, the columns, and the CPU use of other programs."""
    lines, rows = [], [row for row in timing.rows if row.summary is not None]
    slow = [(row, row.first_s / row.summary.min_s) for row in rows if row.summary and row.first_s and row.summary.min_s]
    if slow:
        row, factor = max(slow, key=lambda each: each[1])
        within = "" if row.warm_up_s else ", and is included: --warmup 1 excludes it"
        lines.append(
            f"# the first step takes up to {number(factor)} x the fastest ({row.model} {row.pass_name}){within}"
        )
    of_cpu = "growth of the process" if timing.header.device == "cpu" else "of allocated bytes"
    units = " and ".join(dict.fromkeys(row.unit for row in rows))
    if rows:
        share = "; matmul: rate of work relative to that of the product above" if timing.peaks else ""
        lines.append(f"# rate: {units}; work: operations that the model needs{share}; memory: peak {of_cpu}")
    foreign = max((each.foreign or 0.0 for row in timing.rows for each in row.launches), default=0.0)
    if foreign > FOREIGN_LIMIT:
        lines.append(f"# other programs used up to {foreign:.0%} of the CPUs during a launch")
    return lines


def _peak(peak: Peak) -> str:
    rate = number(peak.flops_per_s / 1e12)
    return f"# a product of {peak.side} x {peak.side} matrices in {peak.precision}: {rate} TFLOP/s"


def _dtypes(found: Dtypes) -> list[str]:
    """Return the dtype table of one model. Rows that are the same in all blocks are shown once."""
    names = ("layer", "kind", "parameters", "input", "output", "gradients")
    rows = [names, *_folded([tuple(getattr(each, name) for name in names) for each in found.layers])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"# types of {found.model} in {found.precision}", f"# {lines[0]}", *(f"  {line}" for line in lines[1:])]


def _folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge the rows of block1, block2, ... into rows of block*, unless a block differs."""
    folded = [(BLOCK.sub("block*", layer), *rest) for layer, *rest in rows]
    is_alike = len({layer for layer, *_ in folded}) == len(set(folded))
    return list(dict.fromkeys(folded)) if is_alike else list(rows)
