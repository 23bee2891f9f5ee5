"""The text output of `muster verify --with`: a row per property with its evidence, tracebacks, and a verdict."""

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.jobs.basics.words import counted

STYLES: Final = {"ok": "green", "fails": "bold red", "waived": "yellow", "n/a": "dim"}


def render(record: Mapping[str, Any]) -> RenderableType:
    """Convert a record of `verify.json` to a rich renderable."""
    blank = Text()
    shown = [part for each in record["tracebacks"] for part in (traced(each), blank)]
    return Group(heading(record), blank, properties(record), blank, *shown, verdict(record))


def heading(record: Mapping[str, Any]) -> Text:
    """Return the first line: the class, its kind, the number of ranks, and the job."""
    ranks = counted(record["world_size"], "rank")
    said = f", kind {record['kind']}, on {ranks} ({record['device']}), with the model and data of job {record['job']}"
    return Text.assemble((record["with"], "bold"), said)


def properties(record: Mapping[str, Any]) -> Table:
    """Return a table with one row per property."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("property", "", "evidence"):
        table.add_column(name, header_style="bold", overflow="fold")
    for row in record["rows"]:
        state = state_of(record, row)
        title = Text.assemble(row["title"], "\n", (row["name"], "dim")) if state == "fails" else Text(row["title"])
        table.add_row(title, Text(state, style=STYLES[state]), Text(row["evidence"]))
    return table


def state_of(record: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the displayed state of a property: "waived" if it fails and is waived, else its own state."""
    return "waived" if row["state"] == "fails" and row["name"] in record["waived"] else str(row["state"])


def traced(failure: Mapping[str, Any]) -> Text:
    """Return a rank's traceback."""
    return Text(f"rank {failure['rank']}, {failure['step']}:\n{failure['traceback'] or failure['error']}", style="red")


def verdict(record: Mapping[str, Any]) -> Text:
    """Return PASS or FAIL, with the number of properties that hold."""
    states = [state_of(record, row) for row in record["rows"]]
    word, style = ("PASS", "bold green") if record["pass"] else ("FAIL", "bold red")
    text = f"  {states.count('ok')} of {len(states) - states.count('n/a')} properties hold"
    failed = [row["name"] for row, state in zip(record["rows"], states, strict=True) if state == "fails"]
    return Text.assemble((word, style), text, f"; {', '.join(failed)} failed" if failed else "")
