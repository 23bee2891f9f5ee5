"""`muster verify` on a screen: one line a tensor, the losses side by side, and a verdict that says why."""

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
    "tight": "the bound of another order of summation (see jobs/train/compare.py)",
    "near": "what rounding reaches (see jobs/train/rounding.py)",
}
MANY_ULP: Final = 10_000  # beyond it the count of floats between two values near zero says nothing


def render(record: Mapping[str, Any]) -> RenderableType:
    """Return a record of `verify.json` as something rich can print."""
    blank = Text()
    return Group(heading(record), blank, tensors(record), blank, losses(record["losses"]), blank, verdict(record))


def heading(record: Mapping[str, Any]) -> Text:
    """Say what is compared with what."""
    exact = ", exact" if record["exact"] else ""
    ranks, steps = counted(record["world_size"], "rank"), counted(record["steps"], "step")
    shards = counted(record["virtual_ranks"], "shard")
    return Text.assemble(
        (record["job"], "bold"),
        f": {record['split']}{exact} on {ranks} against one process over the same {shards}; "
        f"{steps} of batch {record['batch_size']}, {record['precision']} on {record['device']}",
    )


def tensors(record: Mapping[str, Any]) -> Table:
    """Lay out one line for each tensor, with its gradient beside it."""
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
    """Say how one tensor compares: the same bits, or how far apart and how far that may be."""
    if row["bitwise"]:
        return Text("bitwise equal", style="green")
    few = row["ulp"] is not None and row["ulp"] < MANY_ULP
    distance = f"{row['ulp']} ulp, {row['difference']:.1e}" if few else f"{row['difference']:.1e}"
    if row["ok"]:
        return Text(distance, style="yellow")
    wanted = "not bitwise equal" if row["tolerance"] == 0.0 else f"more than {row['tolerance']:.1e}"
    return Text(f"{distance}: {wanted}", style="bold red")


def losses(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out the loss of each step on both sides, each trained on its own."""
    table = _table("step", "loss of the mode", "loss of one process", "")
    for row in rows:
        same = row["mode"] == row["reference"]
        note = Text("equal", style="green") if same else Text(f"{row['mode'] - row['reference']:+.1e}", style="yellow")
        table.add_row(str(row["step"]), repr(row["mode"]), repr(row["reference"]), note)
    return table


def verdict(record: Mapping[str, Any]) -> Text:
    """Close with PASS or FAIL, the class, and the reason."""
    rows = record["rows"]
    same = sum(row["bitwise"] for row in rows)
    passed = record["pass"]
    text = Text.assemble(("PASS" if passed else "FAIL", "bold green" if passed else "bold red"))
    text.append(f"  class {record['class']}: {record['why']}; {same} of {len(rows)} comparisons bitwise equal")
    if passed and same < len(rows):
        drift = max((row["drift"] or 0.0) for row in rows)
        text.append(
            f", the others within {BOUNDS[record['class']]}. "
            f"One process that trains on its own ends up to {drift:.1e} away."
        )
    for fault in faults(record):
        text.append(f"\n      {fault}", style="red")
    return text


def faults(record: Mapping[str, Any]) -> list[str]:
    """List what is outside the class, one phrase a kind."""
    found = []
    for kind, phrase in KINDS.items():
        wrong = [row["name"] for row in record["rows"] if row["kind"] == kind and not row["ok"]]
        if wrong:
            found.append(f"{len(wrong)} of the {phrase} outside the class: {_some(wrong)}")
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
