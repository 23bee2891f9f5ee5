"""`muster cmd JOB.yaml --node K`: the line to paste on node K, to start its ranks by hand, without an agent."""

import argparse
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.options import add_job, add_json, add_runs

if TYPE_CHECKING:
    from jobs.placement import NodePlacement
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

    prepared = prepare(args, here=False)  # the lines are for other machines
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
    """Return one shell line that starts all ranks of a node and ends when they have, with the code of one that failed.

    Its folder, setup lines, environment and run folder are those of `muster run`.
    """
    context = prepared.context
    node = context.placement.nodes[node_rank]
    environment = _environment(prepared, args, node)
    parts = [shlex.join(["cd", context.workdir])]
    if setup := [*context.site.setup, *context.job.setup]:
        parts.append(f"{environment} bash -e -c " + shlex.quote("\n".join(setup)))
    rank = _train_rank if context.job.kind == "train" else _rank
    ranks = [f"{environment} {shlex.join(rank(prepared, args, node, number))}" for number in node.rank_range]
    return " && ".join([*parts, ranks[0] if len(ranks) == 1 else _together(ranks)])


def _together(commands: list[str]) -> str:
    """Run commands side by side in a subshell that keeps their pids as its arguments and returns a failure's code.

    A bare `wait` would return 0 whatever happened. The trap is there because a shell's background processes do not
    hear Ctrl-C.
    """
    starts = " ".join(f'{command} & set -- "$@" $!;' for command in commands)
    wait = 'code=0; for pid in "$@"; do wait $pid || code=$?; done; exit $code'
    return f"(set --; trap 'kill \"$@\"' INT TERM; {starts} {wait})"


def _environment(prepared: "Prepared", args: argparse.Namespace, node: "NodePlacement") -> str:
    """Spell out what every rank's environment holds beside its rank; without the run id, for there is no run yet."""
    from jobs.ranks import RUN_ID
    from launch.plan import shared_environment
    from launch.prepare import this_machine

    context = replace(prepared.context, one_host=args.master_ip.startswith("127."))
    threads = context.job.threads_per_rank
    number = max(1, len(this_machine().cores) // node.ranks) if threads == "auto" else threads
    values = {each.name: each.value for each in shared_environment(context, os.environ, number)}
    # Where the line is pasted, PATH is another.
    own_path = "PATH" not in {**context.site.env, **context.job.env}
    path = [f'PATH={shlex.quote(str(Path(context.python).parent))}:"$PATH"'] if own_path else []
    left_out = {RUN_ID, "PATH"} if own_path else {RUN_ID}
    pairs = [shlex.quote(f"{name}={value}") for name, value in values.items() if name not in left_out]
    return " ".join(["env", *path, *pairs])


def _train_rank(prepared: "Prepared", args: argparse.Namespace, node: "NodePlacement", rank: int) -> list[str]:
    context = prepared.context
    # -I, as for agents: a `jobs` folder in workdir must not shadow ours.
    argv = [context.python, "-I", "-m", "jobs.train", str(Path(args.job).absolute())]
    argv += ["--master-ip", args.master_ip, "--master-port", str(args.master_port)]
    argv += ["--num-nodes", str(len(context.placement.nodes)), "--rank", str(rank)]
    argv += ["--ranks-per-node", str(node.ranks)] if node.ranks > 1 else []
    name = [] if args.name is None else [f"name={json.dumps(args.name)}"]
    argv += [word for override in (*args.overrides, *name) for word in ("--set", override)]
    return [*argv, "--runs", str(context.run.path.parent)]


def _rank(prepared: "Prepared", args: argparse.Namespace, node: "NodePlacement", rank: int) -> list[str]:
    context = prepared.context
    rank_env = replace(context.placement, master_addr=args.master_ip).rank_env(rank, master_port=args.master_port)
    variables = [f"{name}={value}" for name, value in rank_env.variables().items()]
    settings = context.job.settings.model_dump()
    if context.job.kind == "command":
        return [*variables, *settings["argv"]]
    bench = ["--operation", settings["operation"], "--start-timeout-s", f"{context.job.start_timeout_s:g}"]
    return [*variables, context.python, "-I", "-m", "collectives_bench", *bench]
