"""`muster cmd JOB.yaml --node K`: the line to paste on node K, to start its ranks by hand, without an agent."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launch.options import add_job, add_json, add_runs

if TYPE_CHECKING:
    from launch.prepare import Prepared


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from jobs.ranks import DEFAULT_MASTER_PORT

    add_job(parser)
    add_runs(parser)
    add_json(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--node", type=int, metavar="K", help="print the line for this node")
    which.add_argument("--all", action="store_true", help="print the lines for all nodes")
    parser.add_argument("--master-ip", default="127.0.0.1", help="address of node 0 that the others can reach")
    parser.add_argument("--master-port", type=int, default=DEFAULT_MASTER_PORT, help="a free port of node 0")


def run(args: argparse.Namespace) -> int:
    """Print one line per node asked for."""
    from jobs.errors import UsageError
    from launch.prepare import prepare

    prepared = prepare(args)
    count = len(prepared.context.placement.nodes)
    if args.node is not None and not 0 <= args.node < count:
        raise UsageError(f"--node: this job has nodes 0 to {count - 1}, got {args.node}")
    nodes = range(count) if args.all else [args.node]
    lines = {node: line(prepared, args, node) for node in nodes}
    if args.json:
        print(json.dumps([{"node": node, "line": text} for node, text in lines.items()], indent=2))
    else:
        print("\n".join(lines.values()))
    return 0


def line(prepared: "Prepared", args: argparse.Namespace, node_rank: int) -> str:
    """Return one shell line that starts all ranks of a node and ends when they have ended."""
    node = prepared.context.placement.nodes[node_rank]
    commands = [_rank(prepared, args, rank) for rank in range(node.first_rank, node.first_rank + node.ranks)]
    go = f"cd {shlex.quote(prepared.context.workdir)} && "
    if len(commands) == 1:
        return go + commands[0]
    return go + "{ " + " & ".join(commands) + " & wait; }"


def _rank(prepared: "Prepared", args: argparse.Namespace, rank: int) -> str:
    context = prepared.context
    if context.job.kind == "train":
        argv = [sys.executable, "-m", "jobs.train", str(Path(args.job).absolute())]
        argv += ["--master-ip", args.master_ip, "--master-port", str(args.master_port)]
        argv += ["--num-nodes", str(len(context.placement.nodes)), "--rank", str(rank)]
        argv += [word for override in args.overrides for word in ("--set", override)]
        argv += ["--runs", args.runs] if args.runs else []
        return shlex.join(argv)
    env = context.placement.rank_env(rank, master_port=args.master_port)
    variables = {**env.variables(), "MASTER_ADDR": args.master_ip, **context.site.env, **context.job.env}
    argv = ["env", *(f"{name}={value}" for name, value in variables.items())]
    if context.job.kind == "command":
        return shlex.join([*argv, *context.job.settings.model_dump()["argv"]])
    operation = context.job.settings.model_dump()["operation"]
    return shlex.join([*argv, sys.executable, "-m", "collectives_bench", "--operation", operation])
