"""A job's predicted steps as text: the modes, the best mode, and the curve over bucket sizes."""

from typing import Any, Final

from muster.jobs.basics.words import counted

COLUMNS: Final = ("mode", "compute>", "exposed>", "from>", "to>", "step>", "memory a rank>", "note")
ONLY_NETWORK: Final = ("mode", "communication>", "from>", "to>", "memory a rank>", "note")
NOTHING_S: Final = 1e-10  # times below this are rounding errors
BUCKETS: Final = ("bucket>", "buckets>", "step>", "exposed>", "note")


def render(record: dict[str, Any]) -> str:
    """Format the records as text."""
    from muster.launch.bench import closed_forms
    from muster.launch.common import screen

    lines = [_head(record), _source(record), ""]
    known = record["compute"] is not None
    rows = [_full(row) if known else _network(row) for row in record["steps"]]
    lines.append(screen.table(COLUMNS if known else ONLY_NETWORK, rows))
    lines += ["", _verdict(record)]
    if record["not_predicted"]:
        lines.append(
            f"the job's own split, {record['not_predicted']}, was not compared: step times of combined modes cannot "
            "be predicted"
        )
    buckets = record.get("buckets")
    if buckets:
        lines += ["", *_buckets(buckets, known)]
    if closed := closed_forms.job_text(record["closed_forms"], buckets and buckets["best"]):
        lines += ["", *closed]
    return "\n".join(lines)


def _head(record: dict[str, Any]) -> str:
    return (
        f"job {record['job']}: {record['model']}, {record['parameters'] / 1e6:.3g} million parameters, "
        f"batch {record['batch']} on {counted(record['ranks'], 'rank')} of {counted(record['nodes'], 'node')}; "
        f"profile {record['profile']}"
    )


def _source(record: dict[str, Any]) -> str:
    compute = record["compute"]
    if compute is None:
        return (
            "compute times are unknown, so only memory and total communication (none hidden) are predicted; "
            "give --forward-ms and --backward-ms, or --run RUN"
        )
    times = ", ".join(f"{name} {seconds(compute[f'{name}_s'])}" for name in ("forward", "backward", "optimizer"))
    return f"compute times of a rank: {times} ({compute['source']})"


def _full(row: dict[str, Any]) -> list[str | None]:
    return [
        row["mode"],
        seconds(row["compute_s"]),
        *_span(row["exposed"]),
        row["step"] and seconds(row["step"]["seconds"]),
        _memory(row),
        "; ".join(row["notes"]),
    ]


def _network(row: dict[str, Any]) -> list[str | None]:
    return [row["mode"], *_span(row["exposed"]), _memory(row), "; ".join(row["notes"])]


def _span(span: dict[str, float] | None) -> list[str | None]:
    return [None] * 3 if span is None else [seconds(span[key]) for key in ("seconds", "low_s", "high_s")]


def _memory(row: dict[str, Any]) -> str | None:
    from muster.collectives_bench.sizes import size_text

    return row["memory"] and size_text(row["memory"]["total"])


def _verdict(record: dict[str, Any]) -> str:
    ranking = record["ranking"]
    if ranking is None:
        if record["compute"] is None:
            return "no mode is chosen without compute times"
        return "no mode fits: raise --memory, or use more ranks or a smaller batch"
    if ranking["runner_up"] is None:
        return f"best: {ranking['best']}"
    behind = f"{ranking['runner_up']} takes {100 * ranking['margin']:.1f} % longer"
    if ranking["clear"]:
        return f"best: {ranking['best']}; {behind}"
    return f"best: no clear winner; {ranking['best']} is predicted best, {behind}, and their intervals overlap"


def _buckets(buckets: dict[str, Any], known: bool) -> list[str]:
    from muster.collectives_bench.cost.buckets import TORCH_BUCKET
    from muster.collectives_bench.sizes import size_text
    from muster.launch.common import screen

    notes = {TORCH_BUCKET: "torch's default"}
    notes[buckets["best"]] = "; ".join(filter(None, ("best", notes.get(buckets["best"]))))
    rows = [
        [
            size_text(point["bucket_bytes"]),
            point["buckets"],
            seconds(point["step_s"]),
            seconds(point["exposed_s"]),
            notes.get(point["bucket_bytes"], ""),
        ]
        for point in buckets["points"]
    ]
    lines = [screen.table(BUCKETS, rows), ""]
    lines.append(
        "step: from the start of the backward pass to the last byte received"
        + ("" if known else ", with all gradients ready at once")
    )
    best, error = size_text(buckets["best"]), f"{100 * buckets['error']:.1f} %"
    if buckets["runner_up"] is None:
        return [*lines, f"{best}: no other size changes the buckets"]
    behind = f"{size_text(buckets['runner_up'])} takes {100 * buckets['margin']:.1f} % longer"
    if buckets["torch_margin"] is not None:
        behind += f", torch's 25 MB {100 * buckets['torch_margin']:.1f} %"
    verdict = "best" if buckets["clear"] else "no clear winner"
    return [*lines, f"{verdict}: {best}; {behind}; the profile's error is {error}"]


def seconds(value: float | None) -> str | None:
    """Format a time with three digits, in s, ms or us."""
    if value is None:
        return None
    from muster.collectives_bench.sizes import time_text

    return time_text(value, 3) if value > NOTHING_S else "0"
