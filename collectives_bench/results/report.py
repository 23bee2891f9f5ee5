"""The report of a result as text: measured worlds, rows, pairs and slow links, bytes, causes and the verdict.

Rank 0 prints it at the end of a `bench:` job. `muster bench` and `muster bench show` print it for one run or several.
"""

from collections.abc import Sequence

from muster.collectives_bench.records import Result, WorldRecord
from muster.collectives_bench.results import audit, backends, matrix, table
from muster.collectives_bench.results.causes import findings
from muster.collectives_bench.results.missing import missing
from muster.collectives_bench.results.rows import BenchRow, rows_of
from muster.collectives_bench.results.slow import slow


def report_lines(result: Result, unmeasured: Sequence[str] = ()) -> list[str]:
    """Return the whole report, one world after another. `unmeasured` names the worlds without measurements."""
    rows, unfinished = rows_of(result), missing(result).text
    lines: list[str] = []
    for world in _worlds(result, rows):
        lines += ["#"] if lines else []
        for header in result.headers:
            lines += table.header(header) if header.world == world else []
        of_world = [row for row in rows if row.world == world]
        lines += table.lines(of_world)
        if pairs := [pair for pair in result.pairs if pair.world == world]:
            lines += [*matrix.lines(pairs), "#", *(f"# {line}" for line in slow(pairs).lines())]
        lines += [*audit.lines(of_world), *audit.memory(of_world)]
    lines += backends.lines(rows)
    for finding in findings(result):
        lines += [
            "#",
            f"# {finding.what} ({finding.evidence})",
            f"#   cost: {finding.cost}",
            f"#   do: {finding.advice}",
        ]
    lines += ["#", *(table.footer(rows) if rows else [])]
    lines += [f"# {unfinished}"] if unfinished else []
    lines += [f"# not measured: {'; '.join(unmeasured)}"] if unmeasured else []
    return [*lines, f"# verdict: {verdict(result, rows, unmeasured)}"]


def _worlds(result: Result, rows: Sequence[BenchRow]) -> list[WorldRecord]:
    """Return the worlds in the order of measurement."""
    found = [header.world for header in result.headers]
    found += [row.world for row in rows]
    found += [pair.world for pair in result.pairs]
    return list(dict.fromkeys(found))


def verdict(result: Result, rows: Sequence[BenchRow], unmeasured: Sequence[str] = ()) -> str:
    """Return FAILED if a value was wrong or no row has a time, UNFINISHED if blocks are missing, else OK."""
    if any(pair.state in table.BAD_STATES for pair in result.pairs) or table.is_failed(rows):
        return "FAILED"
    if not result.pairs and not any(row.is_measured for row in rows):
        return "FAILED (nothing was measured)"
    return "UNFINISHED" if unmeasured or missing(result).text else "OK"


def is_failed(result: Result, rows: Sequence[BenchRow], unmeasured: Sequence[str] = ()) -> bool:
    """Return True if the verdict is not OK."""
    return verdict(result, rows, unmeasured) != "OK"
