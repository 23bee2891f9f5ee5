"""`muster verify` on a screen: one line a tensor, the losses side by side, and a verdict that says why."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

KINDS: Final = {
    "gradient": "gradients of step 1",
    "parameter": "parameters",
    "buffer": "buffers",
    "loss": "losses",
    "output": "output on a test batch",
}


def render(record: Mapping[str, Any]) -> RenderableType:
    """Return a record of `verify.json` as something rich can print."""
    return Group(heading(record), Text(), tensors(record["rows"]), losses(record["losses"]), Text(), verdict(record))


def heading(record: Mapping[str, Any]) -> Text:
    """Say what is compared with what."""
    exact = f", exact over {record['virtual_ranks']} virtual ranks" if record["exact"] else ""
    text = Text()
    text.append(f"{record['job']}", style="bold")
    text.append(
        f": mode {record['mode']}{exact} on {record['world_size']} rank(s) against one process that accumulates over "
        f"the same {record['virtual_ranks']} shard(s)\n"
        f"{record['steps']} step(s) of batch {record['batch_size']}, {record['precision']} on {record['device']}"
    )
    return text


def tensors(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out one line for each parameter and buffer, with its first gradient beside it."""
    gradients = {row["name"]: row for row in rows if row["kind"] == "gradient"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("tensor", "shape", "gradient of step 1", "after the last step"):
        table.add_column(name, header_style="bold", overflow="fold")
    for row in rows:
        if row["kind"] == "gradient":
            continue
        gradient = gradients.get(row["name"])
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        table.add_row(row["name"], shape, outcome(gradient) if gradient else Text("-", style="dim"), outcome(row))
    return table


def outcome(row: Mapping[str, Any]) -> Text:
    """Say how one tensor compares."""
    if row["bitwise"]:
        return Text("bitwise equal", style="green")
    ulp = "" if row["ulp"] is None else f"{row['ulp']} ulp, "
    text = f"{ulp}max difference {row['difference']:.2e}"
    if row["ok"]:
        return Text(f"{text} (at most {row['tolerance']:.2e})", style="yellow")
    wanted = "must be bitwise equal" if row["tolerance"] == 0.0 else f"at most {row['tolerance']:.2e} allowed"
    return Text(f"{text}: {wanted}", style="bold red")


def losses(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out the loss of each step on both sides."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("step", "loss of the mode", "loss of one process", ""):
        table.add_column(name, header_style="bold", justify="right" if name == "step" else "left")
    for row in rows:
        same = row["mode"] == row["reference"]
        note = Text("equal", style="green") if same else Text(f"{row['mode'] - row['reference']:+.2e}", style="yellow")
        table.add_row(str(row["step"]), repr(row["mode"]), repr(row["reference"]), note)
    return table


def verdict(record: Mapping[str, Any]) -> Text:
    """Close with PASS or FAIL, the class, and the reason."""
    rows = record["rows"]
    same = sum(row["bitwise"] for row in rows)
    text = Text()
    if record["pass"]:
        text.append("PASS", style="bold green")
        text.append(f"  class {record['class']}: {record['why']}; {same} of {len(rows)} comparisons bitwise equal")
        return text
    text.append("FAIL", style="bold red")
    text.append(f"  class {record['class']}: {record['why']}; ")
    text.append("; ".join(faults(record)))
    return text


def faults(record: Mapping[str, Any]) -> list[str]:
    """List what is outside the class, one phrase a kind."""
    found = []
    for kind, phrase in KINDS.items():
        wrong = [row["name"] for row in record["rows"] if row["kind"] == kind and not row["ok"]]
        if wrong:
            found.append(f"{len(wrong)} of the {phrase} outside it ({_some(wrong)})")
    if differing := record["differing_ranks"]:
        ranks = sorted({rank for each in differing.values() for rank in each})
        found.append(f"rank(s) {', '.join(map(str, ranks))} differ from rank 0 in {_some(list(differing))}")
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
