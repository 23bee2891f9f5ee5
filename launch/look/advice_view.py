"""The advice on how to split a job, as text."""

from typing import Any, Final

from muster.jobs.basics.words import counted

COLUMNS: Final = (
    "split",
    "step>",
    "from>",
    "to>",
    "computation>",
    "bubble>",
    "communication>",
    "update>",
    "host>",
    "memory a rank>",
    "sent a step>",
    "note",
)
SPARE: Final = ("host>", "from>", "to>", "update>", "sent a step>")
LEGEND: Final = """\
computation includes the cost of collectives beside it; communication: only the part that no computation hides;
bubble: waiting in a pipeline; host: the part of computation in which GPUs wait for the host;
sent: by the busiest rank."""


def render(record: dict[str, Any]) -> str:
    """Format an advice: the table, the best split, and what would change the answer."""
    from muster.launch.common import screen

    head = (
        f"job {record['job']}: {record['model']}, {record['parameters'] / 1e6:.3g} million parameters, "
        f"batch {record['batch']} on {counted(record['ranks'], 'rank')} of {counted(record['nodes'], 'node')}; "
        f"{counted(record['considered'], 'split')} compared in {record['searched_s']:.1f} s"
    )
    table = screen.table(COLUMNS, map(_cells, record["rows"]), spare=SPARE)
    return "\n".join([head, "", table, "", LEGEND, "", *_verdict(record), *_more(record)])


def _cells(row: dict[str, Any]) -> list[str | None]:
    from muster.collectives_bench.sizes import size_text

    parts, step = row["parts"], row["step"]
    if parts is None or step is None:
        return [row["plan"], *[None] * 10, row["why_not"]]
    times = [_time(step[key]) for key in ("seconds", "low_s", "high_s")]
    times += [_time(parts[key]) for key in ("computation", "bubble", "communication", "update", "host")]
    sizes = [size_text(value) if value else None for value in (row["memory"], parts["wire_bytes"])]
    return [row["plan"], *times, *sizes, row["why_not"]]


def _verdict(record: dict[str, Any]) -> list[str]:
    best, second = record["best"], record["runner_up"]
    if best is None:
        return ["no split fits: use more ranks, a smaller batch, or more memory per rank"]
    lines = [f"best: {best['plan']}, {_time(best['step']['seconds'])} a step"]
    if second is not None:
        behind = f"{second['plan']} takes {100 * record['margin']:.1f} % longer"
        if record["clear"]:
            lines = [f"{lines[0]}; {behind}"]
        else:
            lines = [f"no clear winner: {best['plan']} is predicted best, {behind}, and their intervals overlap"]
    if size := best["changes"].get("bucket_size_mb"):
        lines.append(f"best bucket size: {size:g} MB")
    return lines


def _more(record: dict[str, Any]) -> list[str]:
    lines = [f"with {each['if']}: {each['best']}, {_time(each['step_s'])} a step" for each in record["changes"]]
    for each in record["options"]:
        if each["factor"] is None:
            lines.append(f"with {each['option']}: not supported here")
        else:
            took = f"{_time(each['step']['seconds'])} a step, {each['factor']:.2f} times the passes' time"
            lines.append(f"with {each['option']}: {took}{f'; {why}' if (why := each['why_not']) else ''}")
    return lines


def _time(seconds: float) -> str:
    from muster.collectives_bench.sizes import time_text

    return time_text(seconds, 3) if seconds > 1e-9 else "0"
