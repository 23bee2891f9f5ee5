"""A plot of a job's predicted steps: compute and exposed communication, memory, and the curve over bucket sizes."""

from pathlib import Path
from typing import Any

from muster.jobs.measuring.figures import drawing


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw a prediction into a file. Errors as for `drawing`."""
    panels = 3 if record.get("buckets") else 2
    with drawing(path, 5.5 * panels, 4.5) as figure:
        _draw(record, figure, panels)


def _draw(record: dict[str, Any], figure: Any, panels: int) -> None:
    axes = figure.subplots(1, panels)
    rows = [row for row in record["steps"] if row["exposed"] is not None][::-1]
    names = [row["mode"] for row in rows]
    compute = [1e3 * (row["compute_s"] or 0.0) for row in rows]
    middle = [1e3 * row["exposed"]["seconds"] for row in rows]
    errors = [[1e3 * (row["exposed"]["seconds"] - row["exposed"]["low_s"]) for row in rows]]
    errors.append([1e3 * (row["exposed"]["high_s"] - row["exposed"]["seconds"]) for row in rows])
    axes[0].barh(names, compute, label="compute")
    axes[0].barh(names, middle, left=compute, xerr=errors, label="exposed communication", capsize=2)
    axes[0].set_xlabel("predicted step (ms)")
    axes[0].legend(loc="lower right")
    left = [0.0] * len(rows)
    for part in ("parameters", "gradients", "optimizer", "buffers", "activations"):
        sizes = [row["memory"][part] / 2**20 for row in rows]
        axes[1].barh(names, sizes, left=left, label=part)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes[1].set_xlabel("memory of the fullest rank (MB)")
    axes[1].legend(loc="lower right")
    if panels == 3:
        _curve(axes[2], record["buckets"])
    figure.suptitle(f"{record['job']}: {record['model']}, {record['ranks']} ranks, profile {record['profile']}")


def _curve(axis: Any, buckets: dict[str, Any]) -> None:
    sizes = [point["bucket_bytes"] / 2**20 for point in buckets["points"]]
    axis.plot(sizes, [1e3 * point["step_s"] for point in buckets["points"]], marker="o")
    axis.axvline(buckets["best"] / 2**20, linestyle=":", color="gray")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("bucket (MB); dotted: best")
    axis.set_ylabel("backward and communication (ms)")
