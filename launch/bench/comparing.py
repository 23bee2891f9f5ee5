"""`muster bench compare A B`: a verdict (better, worse or the same) on each row that two results share."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from muster.jobs.basics.words import counted
from muster.launch.bench import results
from muster.launch.common.options import add_json, add_runs

if TYPE_CHECKING:
    from muster.jobs.measuring.compare import Comparison, RowVerdict
    from muster.jobs.measuring.launches import MeasuredRow

FAILING: Final = {"worse": {"worse"}, "better": {"better"}, "any": {"worse", "better"}}
COLUMNS: Final = ("row", "before>", "after>", "time>", "from>", "to>", "launches>", "verdict", "why")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("before", metavar="BEFORE", help="a result file, or a run by id or folder")
    parser.add_argument("after", metavar="AFTER", help="the other side, in the same forms")
    parser.add_argument(
        "--fail-on",
        metavar="WHAT",
        choices=sorted(FAILING),
        help="worse, better or any: exit with 1 if a row has this verdict, or if no row could be judged; with worse "
        "or any, also if a row of BEFORE has no time in AFTER",
    )
    add_runs(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print. Without `--fail-on` the exit code is 0."""
    from muster.jobs.measuring.compare import comparison

    before, after = (_rows(word, args.runs) for word in (args.before, args.after))
    found = comparison(before, after)
    print(json.dumps(record(found), indent=1) if args.json else render(found))
    return 0 if args.fail_on is None else gate(found, args.fail_on)


def _rows(word: str, runs: str | None) -> "Sequence[MeasuredRow]":
    """Read one side, and warn about its missing parts."""
    found = results.read([word], runs)
    if found.missing:
        print(f"muster: warning: {word}: {found.missing}", file=sys.stderr)
    return found.rows()


def gate(found: "Comparison[Any]", fail_on: str) -> int:
    """Return 1 if a row or the total has the verdict `fail_on`, a row has vanished, or no row could be judged."""
    said = {each.verdict for each in (*found.rows, found.together)}
    if said == {"no verdict"}:
        print(f"muster: --fail-on {fail_on}: no row could be judged; measure more launches", file=sys.stderr)
        return 1
    if found.vanished and "worse" in FAILING[fail_on]:
        rows = counted(found.vanished, "row")
        text = f"{rows} that {'was' if found.vanished == 1 else 'were'} measured in BEFORE"
        text += f" {'has' if found.vanished == 1 else 'have'} no time in AFTER"
        print(f"muster: --fail-on {fail_on}: {text}", file=sys.stderr)
        return 1
    return int(bool(said & FAILING[fail_on]))


def record(found: "Comparison[Any]") -> dict[str, Any]:
    """Return a comparison as plain values."""
    rows = [_plain(each, each.row.labels) for each in found.rows if each.row is not None]
    return {
        "verdict": found.verdict,
        "only_before": found.only_before,
        "only_after": found.only_after,
        "vanished": found.vanished,
        "together": _plain(found.together, {key: None for key in rows[0] if key not in vars(found.together)}),
        "rows": rows,
    }


def _plain(verdict: "RowVerdict[Any]", labels: dict[str, Any]) -> dict[str, Any]:
    values = {**vars(verdict), **labels}
    del values["row"]
    for name in ("ratio", "low", "high"):  # JSON has no infinity, so null means that the interval has no limit
        values[name] = None if values[name] in (float("inf"), float("-inf")) else values[name]
    return values


def render(found: "Comparison[Any]") -> str:
    """Format a comparison as a table. `time` is after / before (above 1: slower); `from` and `to` are its interval."""
    from muster.launch.common import screen

    measured = [each.row for each in found.rows if each.row is not None]
    in_full = len({row.named(in_full=False) for row in measured}) < len(measured)
    rows = [(row.named(in_full=in_full), *_cells(each)) for row, each in zip(measured, found.rows, strict=True)]
    rows.append(("all together", *_cells(found.together)))
    return f"{screen.table(COLUMNS, rows)}\n{found.line()}"


def _cells(verdict: "RowVerdict[Any]") -> tuple[str | None, ...]:
    from muster.collectives_bench.sizes import time_text

    times = (None if value is None else time_text(value / 1e6) for value in (verdict.before_us, verdict.after_us))
    ratios = (None if value is None else f"{value:.3f}" for value in (verdict.ratio, verdict.low, verdict.high))
    launches = "/".join(map(str, verdict.launches))
    return (*times, *ratios, launches, verdict.verdict, verdict.why)
