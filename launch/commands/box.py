"""`muster box`: a small cluster inside this machine, with ssh and Slurm, for rehearsals and failure tests."""

import argparse
import json
import os
from collections.abc import Callable
from typing import Final

from muster.cloudlab.box.control import Box
from muster.cloudlab.box.failures import WAYS
from muster.cloudlab.box.hosts import find_box, name_flag
from muster.cloudlab.box.make import make
from muster.cloudlab.box.remove import take_down
from muster.cloudlab.box.spec import DEFAULT_NAME, MAX_NODES, BoxSpec, check_name, parse_clocks, parse_rate
from muster.cloudlab.box.state import box_names
from muster.cloudlab.box.status import BoxStatus
from muster.jobs.basics.errors import UsageError
from muster.jobs.basics.words import counted
from muster.jobs.runfolder.rundir import runs_root
from muster.launch.common import options, screen

COLUMNS: Final = ("node", "address", "state", "sshd", "slurm", "processes>")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs of `muster box` and their options."""
    parser.epilog = (
        "sudo muster box up --nodes 4 --slurm           a cluster of four nodes\n"
        "sudo muster box fail node2 --how power         make a node fail\n"
        "sudo muster box down"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def add(verb: str, phrase: str) -> argparse.ArgumentParser:
        child = verbs.add_parser(verb, help=phrase, description=phrase + ".")
        default = "box" if verb in ("up", "down") else "all" if verb == "status" else "box, or the only box"
        child.add_argument("--name", metavar="X", help=f"name of the box (default: {default})")
        return child

    _configure_up(add("up", "create a box: nodes with a network, ssh, and optionally Slurm"))
    add("down", "remove a box and everything in it, even if its creation failed halfway")
    options.add_json(add("status", "show the state of every node, in one box or in all"))
    ssh = add("ssh", "log in to a node over ssh, or run a command there")
    _add_node(ssh)
    ssh.add_argument("command", metavar="CMD", nargs=argparse.REMAINDER)
    inside = add("exec", "run a command inside a node without ssh, in the current folder")
    _add_node(inside)
    inside.add_argument("command", metavar="-- CMD", nargs=argparse.REMAINDER)
    fail = add("fail", "make a node fail like a real machine")
    _add_node(fail)
    fail.add_argument(
        "--how",
        choices=tuple(WAYS),
        default="power",
        help="power: dies without closing connections (default); kill: its processes die and peers notice; "
        "unplug: loses its network but runs on; freeze: its processes are suspended",
    )
    _add_node(add("heal", "undo a node's failure"))
    rate = add("rate", "set the speed of all links, of one node's link, or between two nodes")
    rate.add_argument(
        "rate", metavar="RATE", help="such as 100mbit; none: unlimited. Without other options, sets all links"
    )
    which = rate.add_mutually_exclusive_group()
    which.add_argument(
        "--between", metavar="NODE", nargs=2, help="only between these two nodes; RATE none removes their own limit"
    )
    which.add_argument("--of", metavar="NODE", help="only this node's link; RATE none removes its own limit")


def _configure_up(up: argparse.ArgumentParser) -> None:
    up.add_argument(
        "--nodes", metavar="N", type=int, default=4, help=f"number of nodes, up to {MAX_NODES} (default: 4)"
    )
    up.add_argument(
        "--rate",
        metavar="RATE",
        default="1gbit",
        help="speed of each link and direction; none: unlimited (default: 1gbit)",
    )
    up.add_argument(
        "--slurm",
        action="store_true",
        help="run Slurm: munge, slurmd on every node, and slurmctld on an extra node `head`",
    )
    up.add_argument(
        "--private-storage", action="store_true", help="give each node its own folder of runs instead of a shared one"
    )
    options.add_runs(up)
    up.add_argument(
        "--clock",
        metavar="NODE=OFFSET",
        action="append",
        default=[],
        help="shift the clock that logins on this node see, as in node1=+180s",
    )


def _add_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="such as node0")


def run(args: argparse.Namespace) -> int:
    """Run the chosen verb."""
    return VERBS[args.verb](args)


def _up(args: argparse.Namespace) -> int:
    state = make(
        BoxSpec(
            name=args.name or DEFAULT_NAME,
            nodes=args.nodes,
            rate=parse_rate(args.rate),
            slurm=args.slurm,
            private_runs=str(runs_root(args.runs).resolve()) if args.private_storage else None,
            clocks=parse_clocks(args.clock),
        )
    )
    spec = state.spec
    flag, suffix = name_flag(spec.name), "" if spec.name == DEFAULT_NAME else f":{spec.name}"
    print(f"box {spec.name}: {counted(spec.nodes, 'node')} in {spec.network}{', with Slurm' if spec.slurm else ''}")
    print(f"try: muster run JOB --hosts box{suffix}, muster box ssh{flag} node0; remove it: muster box down{flag}")
    return 0


def _down(args: argparse.Namespace) -> int:
    name = check_name(args.name or DEFAULT_NAME)
    if take_down(name):
        print(f"box {name}: removed")
        return 0
    others = ", ".join(box_names())
    print(f"box {name}: does not exist" + (f"; existing boxes: {others}" if others else ""))
    return 0


def _status(args: argparse.Namespace) -> int:
    names = box_names() if args.name is None else [find_box(args.name).spec.name]
    found = [Box(name).status() for name in names]
    if args.json:
        print(json.dumps({"boxes": [each.to_json() for each in found]}, indent=2))
    else:
        print("\n\n".join(_render(each) for each in found) or "no box exists; create one: sudo muster box up")
    return 0


def _render(box: BoxStatus) -> str:
    about = f"box {box.name}  {box.state}, network {box.network}, links {box.rate}"
    about += "".join(f", {rate} between {one} and {other}" for one, other, rate in box.slow_pairs)
    about += "".join(f", {rate} of {node}" for node, rate in box.slow_nodes)
    lines = [about, f"ssh -F {box.ssh_config} node0"]
    if box.slurm_conf is not None:
        lines.append(f"SLURM_CONF={box.slurm_conf} sinfo")
    if box.private_runs is not None:
        lines.append(f"each node has its own copy of {box.private_runs}")
    rows = (
        (each.node, each.address, each.state, "listens" if each.sshd else None, each.slurm, each.processes)
        for each in box.nodes
    )
    return "\n".join([*lines, "", screen.table(COLUMNS, rows)])


def _ssh(args: argparse.Namespace) -> int:
    argv = _box(args).ssh_argv(args.node, _words(args.command))
    os.execv(argv[0], argv)


def _exec(args: argparse.Namespace) -> int:
    words = _words(args.command)
    if not words:
        raise UsageError(f"exec {args.node}: the command is missing; run muster box exec {args.node} -- CMD")
    argv = _box(args).exec_argv(args.node, words)
    os.execv(argv[0], argv)


def _fail(args: argparse.Namespace) -> int:
    _box(args).fail(args.node, args.how)
    return 0


def _heal(args: argparse.Namespace) -> int:
    _box(args).heal(args.node)
    return 0


def _rate(args: argparse.Namespace) -> int:
    between = None if args.between is None else (args.between[0], args.between[1])
    _box(args).rate(parse_rate(args.rate), between, of=args.of)
    return 0


def _box(args: argparse.Namespace) -> Box:
    return Box(find_box(args.name).spec.name)


def _words(command: list[str]) -> list[str]:
    return command[1:] if command[:1] == ["--"] else command


VERBS: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "up": _up,
    "down": _down,
    "status": _status,
    "ssh": _ssh,
    "exec": _exec,
    "fail": _fail,
    "heal": _heal,
    "rate": _rate,
}
