"""`muster plan JOB.yaml`: a preview of what `muster run` would do, and why."""

import argparse
import json
import shlex
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from muster.jobs.basics.terminal import terminal_columns
from muster.jobs.basics.words import counted
from muster.launch.common.options import add_json, add_request, given

if TYPE_CHECKING:
    from muster.jobs.spec.job import Job
    from muster.jobs.spec.train import TrainSettings
    from muster.launch.plan.plan import NodePlan
    from muster.launch.submit.prepare import PreparedSubmission

UNDECIDED = (
    "MUSTER_RUN_ID",
    "MUSTER_RUN_DIR",
    "MUSTER_STOP_FILE",
    "MUSTER_FILES",
    "MUSTER_SESSION",
    "TORCHELASTIC_RUN_ID",
    "MASTER_PORT",
)
WIDEST = 48  # most characters shown of a value, so that its origin fits beside it; --json shows the whole value


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "muster plan job.yaml -H hosts.txt\n"
        "muster plan -n 4 train.py                       shows the Python it uses, and why"
    )
    add_request(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compute the plan as records, then print them."""
    from muster.launch.plan.plan import NodeMachine, plan_nodes
    from muster.launch.submit.prepare import prepare, this_machine
    from muster.launch.submit.request import Request
    from muster.launch.submit.routes import commands_of

    prepared = prepare(given(args, Request))
    nodes = prepared.context.placement.nodes
    local = prepared.route.transport == "local"
    # The hardware of other machines is unknown until their agents answer.
    machines = [this_machine()] * len(nodes) if local else [NodeMachine(node.host, ()) for node in nodes]
    record = describe(prepared, plan_nodes(prepared.context, machines, None), commands_of(prepared.submission))
    print(json.dumps(record, indent=2) if args.json else render(record))
    return 0


def describe(prepared: "PreparedSubmission", plans: "list[NodePlan]", commands: list[list[str]]) -> dict[str, Any]:
    """Return the plan as plain values; None for values that are decided only at the start."""
    from muster.jobs.spec.train import TrainSettings

    job, context = prepared.context.job, prepared.context
    training = job.settings if isinstance(job.settings, TrainSettings) else None
    world_size = context.placement.world_size
    split = training.split(world_size) if training else None
    return {
        "name": job.name,
        "kind": job.kind,
        "transport": prepared.route.transport,
        "start": commands,
        "world_size": world_size,
        "pipeline": pipeline_of(job, training, world_size) if training and split and split.schedule else None,
        "workdir": context.workdir,
        "runs": str(context.run.path.parent),
        "setup": [*context.site.setup, *job.setup],
        "nodes": [
            {
                "node": plan.placement.node_rank,
                "host": plan.placement.host,
                "address": plan.placement.address,
                "environment": [_value(value._asdict()) for value in plan.warm_environment],
                "ranks": [
                    {
                        "rank": rank.rank,
                        "cores": rank.cores,
                        "gpus": rank.gpus,
                        "threads": rank.threads,
                        "places": split.places(rank.rank) if split else {},
                        "environment": [_value(value._asdict()) for value in rank.environment],
                    }
                    for rank in plan.ranks
                ],
            }
            for plan in plans
        ],
        "python": asdict(context.interpreter) if context.interpreter else None,
        "command": context.argv if context.entry is None else None,
        "function": context.entry,
    }


def pipeline_of(job: "Job", settings: "TrainSettings", world_size: int) -> dict[str, Any]:
    """Return a pipeline's schedule, its micro-batches, and the layers of every stage.

    The stages are None if only the ranks know them: they time the layers, or the user's code builds the model.
    """
    from muster.jobs.spec.expand import split_text
    from muster.launch.bench.loads import load_of
    from muster.launch.bench.own_split import own_split
    from muster.pipe.schedules.tables import SCHEDULES

    split = settings.split(world_size)
    record = {"split": split_text(settings), "schedule": split.schedule, "microbatches": split.microbatches}
    if settings.cut == "profile" or settings.model.make is not None:
        return {**record, "stages": None}
    _, load = own_split(settings, load_of(job, ranks=world_size, backend="gloo"))
    assert load.split is not None
    rank_of = SCHEDULES[split.schedule].rank_of(split.pipe, split.chunks)
    return {
        **record,
        "stages": [
            {"stage": stage, "pipe": rank_of[stage], "layers": list(layers)}
            for stage, layers in enumerate(load.split.stages)
        ],
    }


def _value(value: dict[str, Any]) -> dict[str, Any]:
    undecided = value["name"] in UNDECIDED or (value["name"] == "MASTER_ADDR" and not value["value"])
    return {**value, "value": None} if undecided else value


def render(record: dict[str, Any]) -> str:
    """Format the plan as text: ranks and the variables that differ between them, shared variables, commands."""
    ranks = [rank for node in record["nodes"] for rank in node["ranks"]]
    lines = [
        f"job {record['name']}: {record['kind']}, {counted(len(record['nodes']), 'node')}, "
        f"{counted(record['world_size'], 'rank')}, on {record['transport']}",
        f"run folder: a new one under {record['runs']}",
        f"ranks run in: {record['workdir']}",
        "",
    ]
    own, shared = _split(ranks)
    axes = [] if len(ranks[0]["places"]) < 2 else list(ranks[0]["places"])  # on a single axis, place = rank
    rows = [["rank", *axes, "node", "host", "address", "cores", "threads", *own]]
    for node in record["nodes"]:
        for rank in node["ranks"]:
            values = {each["name"]: each["value"] for each in rank["environment"]}
            cores = ",".join(map(str, rank["cores"])) or "all"
            address = node["address"] or "(at start)"
            split = [str(rank["places"][axis]) for axis in axes]
            place = [str(node["node"]), node["host"], address, cores, str(rank["threads"])]
            rows.append([str(rank["rank"]), *split, *place, *(values.get(name, "") for name in own)])
    lines += _columns(rows, headed=True)
    lines += _pipeline_lines(record["pipeline"])
    lines += ["", "environment of every rank"]
    lines += _columns([[f"  {each['name']}", _shown(each["value"]), each["origin"]] for each in shared])
    lines += ["", "environment of the process that forks the ranks"]
    environment = record["nodes"][0]["environment"]
    lines += _columns([[f"  {each['name']}", _shown(each["value"]), each["origin"]] for each in environment])
    lines += ["", "commands"]
    lines += [f"  setup      {line}" for line in record["setup"]]
    each = len(record["start"]) == len(record["nodes"])
    lines += [f"  {f'node {n}' if each else 'start':<10} {shlex.join(argv)}" for n, argv in enumerate(record["start"])]
    what = shlex.join(record["command"]) if record["command"] else f"{record['function']} in a fork of the warm process"
    lines.append(f"  every rank {what}")
    if python := record["python"]:
        words = shlex.join(python["words"])
        lines.append(f"  python     {words} ({python['why']})" if words else f"  python     {python['why']}")
    return "\n".join(lines)


def _pipeline_lines(pipeline: dict[str, Any] | None) -> list[str]:
    """Format the schedule of a pipeline and the layers of each stage."""
    if pipeline is None:
        return []
    parts = counted(pipeline["microbatches"], "micro-batch")
    lines = ["", f"pipeline {pipeline['split']}, {parts} a step"]
    if pipeline["stages"] is None:
        return [*lines, "  the ranks assign layers to stages at the start (cut: profile, or your own model)"]
    rows = [["  stage", "pipe", "layers", "from", "to"]]
    for each in pipeline["stages"]:
        layers = each["layers"]
        rows.append([f"  {each['stage']}", str(each["pipe"]), str(len(layers)), layers[0], layers[-1]])
    return [*lines, *_columns(rows, headed=True)]


def _split(ranks: list[dict[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the names of variables that differ between ranks, and the variables that all ranks share."""
    values: dict[str, set[str | None]] = {}
    for rank in ranks:
        for each in rank["environment"]:
            values.setdefault(each["name"], set()).add(each["value"])
    varying = [name for name, seen in values.items() if len(seen) > 1]
    return varying, [each for each in ranks[0]["environment"] if each["name"] not in varying]


def _shown(value: str | None) -> str:
    if value is None:
        return "(at start)"
    quoted = shlex.quote(value)
    return quoted if len(quoted) <= WIDEST else f"{quoted[: WIDEST - 1]}…"


def _columns(rows: list[list[str]], *, headed: bool = False) -> list[str]:
    """Align the columns of rows. If the terminal is too narrow, write each row as wrapped text instead."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    limit = terminal_columns()
    if max(map(len, lines)) <= limit:
        return lines
    if headed:
        pairs = [zip(rows[0], row, strict=True) for row in rows[1:]]
        texts = [", ".join(f"{head} {cell.strip()}" for head, cell in each) for each in pairs]
    else:
        texts = [f"{name} = {value}  ({origin})" for name, value, origin in rows]
    return [line for text in texts for line in textwrap.wrap(text, limit, subsequent_indent=" " * 6)]
