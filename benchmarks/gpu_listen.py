"""The ranks of a benchmark on GPUs, one a GPU: started, heard - rank 0 says lines of JSON - and ended in time."""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_throughput import end


def start(script: Path, variable: str, args: argparse.Namespace) -> "list[subprocess.Popen[bytes]]":
    """Start `args.gpus` ranks of a script, which find the arguments in an environment variable, as JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    order = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    common = {"WORLD_SIZE": str(args.gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, **common, variable: json.dumps(order)}
    return [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(args.gpus)
    ]


def listen(
    ranks: "list[subprocess.Popen[bytes]]", limit_s: float, tell: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Read all that rank 0 says, and `tell` each as it comes; a rank that failed, or too little time, is said last."""
    said: list[dict[str, Any]] = []
    watch = threading.Timer(limit_s, lambda: [rank.kill() for rank in ranks])
    watch.start()
    assert ranks[0].stdout is not None
    for line in ranks[0].stdout:
        try:
            said.append(json.loads(line))
        except ValueError:
            print(f"  | {line.decode(errors='replace').rstrip()}", flush=True)
            continue
        tell(said[-1])
    codes = end(ranks, patience_s=20.0)
    watch.cancel()
    if any(codes):
        said.append({"say": "failed", "why": f"ranks ended with {codes} within {limit_s:.0f} s"})
    return said
