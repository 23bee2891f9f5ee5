"""Tables of rows in the format of nccl-tests: settings after `#`, names, units, fixed columns, and a verdict.

    # all_reduce: every rank gets the sum of all · 2 nodes x 1 rank, gloo on cpu
    #       size       count    type  root   place        time   +-     min       p99  algbw   busbw  #wrong …
    #        (B)  (elements)                              (us)  (%)    (us)      (us) (GB/s)  (GB/s)
         1048576      262144    fp32     -  in              …

The time is the median of the launches' medians. The column +- has half the width of its interval, in percent. The
footer shows the confidence. The column b2b has the time of one call in a loop without pauses. GB/s is 1e9 bytes per
second.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from muster.collectives_bench.catalog import DTYPES, OPERATIONS
from muster.collectives_bench.records import BenchHeader, HostFacts
from muster.jobs.basics.words import counted
from muster.jobs.measuring.columns import SPREAD, Column, cells, headings, utc
from muster.jobs.measuring.launches import confidence_lines

if TYPE_CHECKING:
    from muster.collectives_bench.results.rows import BenchRow

ROOTED: Final = ("broadcast", "reduce", "gather", "scatter", "tree_broadcast", "tree_reduce", "gather_scatter")
BAD_STATES: Final = (
    "wrong",
    "failed",
    "timeout",
)  # the states for which the verdict is FAILED; refused and unsupported are not among them
MOST_FLAGGED: Final = 5  # maximum number of rows that the footer lists


def number(value: float | None, width: int = 0) -> str:
    """Format a measured value with three or four digits, never as a power of ten; None becomes `-`."""
    if value is None:
        return "-".rjust(width)
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 or size == 0 else 3 if size >= 0.1 else 4
    return f"{value:.{digits}f}".rjust(width)


def _count(row: "BenchRow") -> str:
    return str(row.nbytes // DTYPES[row.cell.dtype]) if row.nbytes else "-"


def _launches(row: "BenchRow") -> str:
    return str(row.launches) if row.launches == row.tried else f"{row.launches}/{row.tried}"


LABELS: Final[tuple[Column, ...]] = (
    ("size", "(B)", 12, lambda row: str(row.nbytes) if row.nbytes else "-"),
    ("count", "(elements)", 12, _count),
    ("type", "", 7, lambda row: row.cell.dtype if row.nbytes else "-"),
    ("redop", "", 6, lambda row: "sum" if OPERATIONS[row.cell.operation].reduces else "-"),
    ("root", "", 5, lambda row: "0" if row.cell.operation in ROOTED else "-"),
    ("place", "", 10, lambda row: row.cell.way),
)
NUMBERS: Final[tuple[Column, ...]] = (
    ("time", "(us)", 10, lambda row: number(row.p50_us)),
    SPREAD,
    ("min", "(us)", 10, lambda row: number(row.min_us)),
    ("p99", "(us)", 10, lambda row: number(row.p99_us)),
    ("b2b", "(us)", 10, lambda row: number(row.throughput_us)),
    ("algbw", "(GB/s)", 8, lambda row: number(row.algbw)),
    ("busbw", "(GB/s)", 8, lambda row: number(row.busbw)),
    ("#wrong", "", 7, lambda row: "-" if row.wrong is None else str(row.wrong)),
    ("n", "", 6, lambda row: str(row.samples)),
    ("launches", "", 9, _launches),
)


def header(header: BenchHeader) -> list[str]:
    """Return the header lines: versions, world, settings, and one line for each host."""
    world, settings = header.world, header.settings
    nccl = f" · nccl {header.nccl}" if header.nccl else ""
    lines = [f"# {header.name}: {world.text} · torch {header.torch}{nccl} · {utc(header.time)}"]
    shown = f"launches {settings.launches}, block {settings.block_s:g} s, timeout {settings.timeout_s:g} s, "
    shown += f"precision {settings.precision:g}, seed {settings.seed}, check {'yes' if settings.check else 'no'}"
    lines.append(f"# settings: {shown}")
    lines += [f"# {_host(host)}" for host in header.hosts]
    if header.init_s is not None:
        lines.append(f"# creating the group took {header.init_s:.2f} s (first launch)")
    return lines


def lines(rows: "Iterable[BenchRow]") -> list[str]:
    """Return the lines of one section for each operation and world, in the order of the rows."""
    found: list[str] = []
    for (world, operation), group in groupby(rows, key=lambda row: (row.world, row.cell.operation)):
        found += ["#", f"# {operation}: {OPERATIONS[operation].phrase} · {world.text}"]
        found += headings((*LABELS, *NUMBERS), "flags")
        found += [_line(row) for row in group]
    return found


def footer(rows: "Sequence[BenchRow]") -> list[str]:
    """Return the summary of all rows: wrong values, failed rows, and the worst flagged rows."""
    checked = [row for row in rows if row.wrong is not None]
    wrong = sum(row.wrong or 0 for row in checked)
    found = [f"# wrong values: {wrong} in {counted(len(checked), 'checked row')}"]
    failed = [row for row in rows if row.state in BAD_STATES]
    skipped = [row for row in rows if row.state in ("refused", "unsupported")]
    if failed:
        found.append(f"# failed: {len(failed)} of {counted(len(rows), 'row')}: {_names(failed)}")
    if skipped:
        found.append(f"# not measured: {len(skipped)} of {counted(len(rows), 'row')}: {_names(skipped)}")
    flagged = sorted((row for row in rows if row.flags), key=lambda row: (-len(row.flags), -(row.spread or 0.0)))
    several = len({row.world for row in rows}) > 1
    for row in flagged[:MOST_FLAGGED]:
        found.append(f"# flagged: {row.named(in_full=several)}: {', '.join(row.flags)}")
    if len(flagged) > MOST_FLAGGED:
        found.append(f"# and {counted(len(flagged) - MOST_FLAGGED, 'other row')} with flags")
    return [*found, *confidence_lines(rows)]


def is_failed(rows: "Sequence[BenchRow]") -> bool:
    """Return True if any row had a wrong value, a crash or a stall."""
    return any(row.state in BAD_STATES or row.wrong for row in rows)


def _names(rows: "Sequence[BenchRow]") -> str:
    """Count rows by operation and state, as in `reduce (3 failed), gather (1 timeout)`."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row.cell.operation, row.state)
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{operation} ({count} {state})" for (operation, state), count in counts.items())


def _line(row: "BenchRow") -> str:
    start = cells(LABELS, row)
    flags = "  " + ", ".join(row.flags) if row.flags else ""
    if row.p50_us is None:
        return f"{start}  {row.state}{': ' if row.reason else ''}{row.reason}{flags}"
    state = f"  {row.state}: {row.reason}" if row.state != "ok" else ""
    return f"{start}{cells(NUMBERS, row)}{flags}{state}"


def _host(host: HostFacts) -> str:
    parts = [f"{counted(host.ranks, 'rank')} on {counted(host.cores, 'core')}"]
    parts += [host.cpu] if host.cpu else []
    parts += [f"{len(host.gpus)} x {host.gpus[0]}"] if host.gpus else []
    if host.memory_bytes:
        parts.append(f"{host.memory_bytes / 2**30:.0f} GB")
    network = [host.interface]
    network += [f"{host.speed_mbit} Mbit/s"] if host.speed_mbit else []
    network += [f"mtu {host.mtu}"] if host.mtu else []
    network += [host.congestion_control]
    if any(network):
        parts.append(" ".join(word for word in network if word))
    parts += [f"Linux {host.kernel}"] if host.kernel else []
    parts += [" ".join(f"{name}={value}" for name, value in sorted(host.environment.items()))]
    return f"node {host.node} {host.host}: {', '.join(part for part in parts if part)}"
