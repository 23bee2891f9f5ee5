"""The text output of `muster verify`: a row per tensor, the losses of both sides, and a verdict with its reason."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.jobs.basics.words import counted

KINDS: Final = {
    "gradient": "gradients",
    "parameter": "parameters",
    "buffer": "buffers",
    "loss": "losses",
    "output": "outputs",
}
BOUNDS: Final = {
    "tight": "the bound for a different order of summation (see jobs/train/compare.py)",
    "near": "the bound for rounding errors (see jobs/train/rounding.py)",
}
MANY_ULP: Final = 10_000  # distances in ulp above this occur near zero, and mean nothing


def render(record: Mapping[str, Any]) -> RenderableType:
    """Convert a record of `verify.json` to a rich renderable."""
    blank = Text()
    return Group(heading(record), blank, tensors(record), blank, losses(record["losses"]), blank, verdict(record))


def heading(record: Mapping[str, Any]) -> Text:
    """Return the first line: the two sides of the comparison, and its size."""
    exact = ", exact" if record["exact"] else ""
    ranks, steps = counted(record["world_size"], "rank"), counted(record["steps"], "step")
    shards = counted(record["virtual_ranks"], "shard")
    return Text.assemble(
        (record["job"], "bold"),
        f": {record['split']}{exact} on {ranks} against one process over the same {shards}; "
        f"{steps} of batch {record['batch_size']}, {record['precision']} on {record['device']}",
    )


def tensors(record: Mapping[str, Any]) -> Table:
    """Return a table with a row for each tensor and its gradient."""
    gradients = {row["name"]: row for row in record["rows"] if row["kind"] == "gradient"}
    table = _table("tensor", "shape", "worst gradient", "after all")
    table.columns[0].no_wrap = True
    for row in record["rows"]:
        if row["kind"] == "gradient":
            continue
        gradient = gradients.get(row["name"])
        cells = [Text(row["name"]), Text("x".join(map(str, row["shape"])) or "scalar")]
        cells += [outcome(gradient) if gradient else Text("-", style="dim"), outcome(row)]
        table.add_row(*cells)
    return table


def outcome(row: Mapping[str, Any]) -> Text:
    """Format the comparison of one tensor: bitwise equal, or its distance and, if exceeded, the tolerance."""
    if row["bitwise"]:
        return Text("bitwise equal", style="green")
    few = row["ulp"] is not None and row["ulp"] < MANY_ULP
    distance = f"{row['ulp']} ulp, {row['difference']:.1e}" if few else f"{row['difference']:.1e}"
    if row["ok"]:
        return Text(distance, style="yellow")
    wanted = "not bitwise equal" if row["tolerance"] == 0.0 else f"more than {row['tolerance']:.1e}"
    return Text(f"{distance}: {wanted}", style="bold red")


def losses(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with the loss of each step on both sides, which train independently."""
    table = _table("step", "loss of the mode", "loss of one process", "")
    for row in rows:
        same = row["mode"] == row["reference"]
        note = Text("equal", style="green") if same else Text(f"{row['mode'] - row['reference']:+.1e}", style="yellow")
        table.add_row(str(row["step"]), repr(row["mode"]), repr(row["reference"]), note)
    return table


def verdict(record: Mapping[str, Any]) -> Text:
    """Return PASS or FAIL, with the class of exactness, the reason, and the faults."""
    rows = record["rows"]
    same = sum(row["bitwise"] for row in rows)
    passed = record["pass"]
    text = Text.assemble(("PASS" if passed else "FAIL", "bold green" if passed else "bold red"))
    text.append(f"  class {record['class']}: {record['why']}; {same} of {len(rows)} comparisons bitwise equal")
    if passed and same < len(rows):
        drift = max((row["drift"] or 0.0) for row in rows)
        text.append(
            f", the others within {BOUNDS[record['class']]}. "
            f"Independent training in one process differs by up to {drift:.1e}."
        )
    for fault in faults(record):
        text.append(f"\n      {fault}", style="red")
    return text


def faults(record: Mapping[str, Any]) -> list[str]:
    """List the tensors that exceed the bound, one phrase per kind, and the ranks that differ."""
    found = []
    for kind, phrase in KINDS.items():
        wrong = [row["name"] for row in record["rows"] if row["kind"] == kind and not row["ok"]]
        if wrong:
            found.append(f"{len(wrong)} of the {phrase} exceed the bound: {_some(wrong)}")
    if differing := record["differing_ranks"]:
        ranks = sorted({rank for each in differing.values() for rank in each})
        verb = "rank {} differs" if len(ranks) == 1 else "ranks {} differ"
        found.append(f"{verb.format(', '.join(map(str, ranks)))} from rank 0 in {_some(list(differing))}")
    return found


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, header_style="bold", overflow="fold")
    return table


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
