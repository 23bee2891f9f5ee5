"""Start a benchmark without an agent: `python -m muster.collectives_bench` by hand, under torchrun, srun or mpirun.

Rank 0 writes the records to `--out`. It also serves the store, unless the launcher serves it.
"""

import argparse
import os
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError

from muster.collectives_bench.ranks.run import BenchTask, conduct, run_operation
from muster.collectives_bench.settings import HELLO, BenchSettings
from muster.jobs.basics import exits
from muster.jobs.basics.errors import MusterError, RefusedError
from muster.jobs.hosts.detect import Flags, detect
from muster.jobs.machine import network
from muster.jobs.world.guard import complain
from muster.jobs.world.world import GLOO_INTERFACES

NCCL_INTERFACES: Final = "NCCL_SOCKET_IFNAME"
OUT: Final = "bench.jsonl"
TRUTH: Final = {"true": True, "false": False}

# The settings that have a command line option, with their types. On the command line, commas separate list items.
OPTIONS: Final[dict[str, Any]] = {
    "operation": list,
    "sizes": list,
    "dtypes": list,
    "places": str,
    "calls": list,
    "backend": str,
    "device": str,
    "launches": int,
    "block_s": float,
    "timeout_s": float,
    "check": bool,
    "wire": bool,
    "pairs": bool,
    "seed": int,
}


def main(argv: list[str] | None = None) -> int:
    """Read the options, then run one rank; return its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    given = {name: value for name in OPTIONS if (value := getattr(args, name)) is not None}
    try:
        settings = BenchSettings(**{"operation": [HELLO], **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "operation"
        parser.error(f"argument {option_of(name)}: {first['msg'].removeprefix('Value error, ')}")
    try:
        if settings.is_hello:
            return run_operation(settings, args.start_timeout_s)
        return conduct(task_of(settings, args))
    except MusterError as error:
        complain(f"muster: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        complain("muster: stopped by the user")
        return exits.STOPPED


def build_parser() -> argparse.ArgumentParser:
    """Build a parser with one option for each setting in OPTIONS, documented by the setting's description."""
    parser = argparse.ArgumentParser(
        prog="python -m muster.collectives_bench",
        description="Run one rank started by another launcher, such as torchrun, srun or mpirun.",
    )
    for name, kind in OPTIONS.items():
        words = BenchSettings.model_fields[name].description
        read = {list: lambda text: text.split(","), bool: _truth}.get(kind, kind)
        parser.add_argument(option_of(name), type=read, metavar=name.upper(), help=words)
    parser.add_argument("--out", default=OUT, metavar="FILE", help=f"where rank 0 writes its records ({OUT})")
    parser.add_argument("--start-timeout-s", type=float, default=60.0, help="seconds for all ranks to arrive (60)")
    return parser


def option_of(name: str) -> str:
    """Return the name of a setting's option."""
    return "--" + name.replace("_", "-")


def task_of(settings: BenchSettings, args: argparse.Namespace) -> BenchTask:
    """Detect the rank and network interface of this process; return its task.

    Raises:
        RefusedError: if a launcher's variables contradict each other, an operation needs more ranks than there are,
            or the output file exists already.
    """
    env = detect(os.environ, Flags()).env
    out = Path(args.out).absolute()
    if env.rank == 0 and out.exists() and out.stat().st_size:  # otherwise two runs in one file would look like one run
        raise RefusedError(f"--out {args.out}: exists already; remove it, or name another file")
    settings.check_world(env.world_size)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // env.local_world_size))
    if GLOO_INTERFACES not in os.environ and (route := network.route_to(env.master_addr)):
        os.environ[GLOO_INTERFACES] = route[0]  # because gloo's default depends on the host name
        os.environ.setdefault(NCCL_INTERFACES, f"={route[0]}")
    return BenchTask(settings, env, out, "bench", args.start_timeout_s)


def _truth(text: str) -> bool:
    if text not in TRUTH:
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return TRUTH[text]
