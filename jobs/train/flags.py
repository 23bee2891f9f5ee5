"""The command line of `python -m muster.jobs.train`, in its own module so that `--help` does not import torch."""

import argparse
import time
from collections.abc import Sequence

from muster.jobs.hosts.ranks import DEFAULT_MASTER_PORT


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. `began` is the time of this call in unix seconds."""
    parser = argparse.ArgumentParser(
        prog="python -m muster.jobs.train", description="Train as one rank, without an agent."
    )
    parser.add_argument("job", metavar="JOB", help="the job file (YAML); it must have a train: section")
    parser.add_argument("--master-ip", metavar="ADDRESS", help="address at which the other ranks reach rank 0")
    parser.add_argument("--master-port", type=int, metavar="PORT", help=f"default: {DEFAULT_MASTER_PORT}")
    parser.add_argument("--num-nodes", type=int, metavar="N")
    parser.add_argument("--rank", type=int, metavar="R", help="rank of this process")
    parser.add_argument("--local-rank", type=int, metavar="L", help="number of this process on its node")
    parser.add_argument("--ranks-per-node", type=int, metavar="K")
    parser.add_argument("--runs", metavar="DIR", help="folder of all runs (default: MUSTER_RUNS, else ./runs)")
    parser.add_argument("--resume", metavar="RUN", help="resume a run, given by path, id or a part of the id")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    parser.set_defaults(began=time.time())
    return parser.parse_args(argv)
