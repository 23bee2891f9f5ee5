"""Summarize a trace as one record (`profile.json`), which `muster profile` reads, and as tables.

{"version": 1, "rank": 0, "attempt": 0, ...facts of the rank,
 "steps": [{"step": 6, "seconds": 0.21, "communication_s": 0.06, "hidden_s": 0.02, "overlap": 0.33}, ...],
 "overlap": 0.33,            time in communication while computing / time in communication, over all steps
 "phases": {"forward": 0.2, ...}, "device_phases": {...}, "kinds": {"matmul": 0.3, ...}, "matmul_share": 0.6,
 "modules": {"mlp": 0.1, ...}, "memory_over_time": [[0.01, 4096], ...], "allocations": [{"bytes": ...}, ...],
 "operators": [...], "kernels": [...], "memory": {...}, "files": {...}}
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from muster.jobs.trace.modules import modules_of
from muster.jobs.trace.nesting import Nested
from muster.jobs.trace.operators import (
    Operator,
    device_phases_of,
    device_spans_of,
    kernels_of,
    kinds_of,
    matmul_share,
    operators_of,
    phases_of,
)
from muster.jobs.trace.overlap import added, overlap_by_step

VERSION: Final = 1
ROWS: Final = 50
COLUMNS: Final = (
    ("cpu total ms", "cpu_total_us"),
    ("cpu self ms", "cpu_self_us"),
    ("cuda total ms", "cuda_total_us"),
    ("cuda self ms", "cuda_self_us"),
)
LONGEST: Final = 72  # limit in characters for a name in a table


def record_of(nested: Nested, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize a trace; `facts` are further entries of the record, such as rank and attempt."""
    operators, kernels = operators_of(nested), kernels_of(nested)
    kinds = kinds_of(kernels if nested.trace.has_device else operators)
    modules = modules_of(nested)
    steps, device = overlap_by_step(nested), device_spans_of(nested)
    return {
        "version": VERSION,
        **facts,
        "steps": [
            {
                "step": step.number,
                "seconds": (step.end_us - step.start_us) / 1e6,
                "device_s": device.get(step.number),
                "communication_s": overlap.communication_s,
                "hidden_s": overlap.hidden_s,
                "overlap": overlap.ratio,
            }
            for step, overlap in zip(nested.trace.steps, steps, strict=True)
        ],
        "overlap": added(steps).ratio,
        "phases": phases_of(nested.trace),
        "device_phases": device_phases_of(nested),
        "kinds": kinds,
        **({"modules": modules} if modules else {}),
        "matmul_share": matmul_share(kinds),
        "operators": [asdict(row) for row in operators[:ROWS]],
        "kernels": [asdict(row) for row in kernels[:ROWS]],
    }


def operators_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows of operators as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Operator.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def operators_text(record: Mapping[str, Any]) -> str:
    """Format the phases, kinds, modules, operators and kernels of a record as plain text."""
    steps = [step["step"] for step in record["steps"]]
    parts = [
        f"rank {record['rank']}, attempt {record['attempt']}, {numbers(steps)} of {record.get('steps_of_job', '?')}"
    ]
    parts += [_shares("phases on the host", record["phases"])]
    if record["device_phases"]:
        parts += [_shares("phases on the device", record["device_phases"])]
    parts += [_shares("kinds" + " of kernels" * bool(record["kernels"]), record["kinds"])]
    if "modules" in record:
        parts += [_shares("modules in forward and backward", record["modules"])]
    parts += ["operators\n" + table_of(record["operators"])]
    if record["kernels"]:
        parts += ["kernels\n" + table_of(record["kernels"])]
    return "\n\n".join(parts) + "\n"


def numbers(steps: Sequence[int]) -> str:
    """Format the numbers of the recorded steps."""
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]}-{steps[-1]}"


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format operators as a table; a time column is left out if all its values are 0."""
    columns = [(head, key) for head, key in COLUMNS if any(row[key] for row in rows)]
    lines = ["  ".join([*(f"{head:>13}" for head, _ in columns), f"{'calls':>7}", f"{'kind':13}", "name"])]
    for row in rows:
        cells = [f"{row[key] / 1e3:13.3f}" for _, key in columns]
        lines.append("  ".join([*cells, f"{row['calls']:7}", f"{row['kind']:13}", shortened(row["name"])]))
    return "\n".join(lines)


def shortened(name: str) -> str:
    """Shorten the name of an operator or kernel to `LONGEST` characters."""
    return name if len(name) <= LONGEST else name[: LONGEST - 2] + ".."


def _shares(title: str, seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values()) or 1.0
    return "\n".join(
        [title, *(f"{each * 1e3:13.3f} ms  {each / total:6.1%}  {name}" for name, each in seconds.items())]
    )
