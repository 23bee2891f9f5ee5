"""Shared by the benchmarks: the same script again, once a rank, on the loopback of this machine or in a box's nodes.

A rank finds itself by the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as under torchrun; it computes on
one thread, as the launcher's ranks do where they share cores. What rank 0 prints is one JSON document: the result.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.cloudlab.box.control import Box

LIMIT_S = 900.0
RESULT = "BENCHMARK_RESULT"  # the file that rank 0 writes, under muster run
BOX_PORT = 29411  # of the master: a fresh box has no other
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}  # the box has no name server: torch warns of that


def on_loopback(script: str, arguments: Sequence[str], ranks: int, limit_s: float = LIMIT_S) -> Any:
    """Run ranks of a script on this machine; return what rank 0 printed.

    Raises:
        SystemExit: a rank failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return _result([_command(script, arguments)] * ranks, found, limit_s)


def in_nodes(box: "Box", script: str, arguments: Sequence[str], limit_s: float = LIMIT_S) -> Any:
    """Run a rank of a script in every node of a box; return what rank 0 printed.

    Raises:
        SystemExit: a rank failed.
    """
    spec = box.state.spec
    found = {"MASTER_ADDR": spec.address("node0"), "MASTER_PORT": str(BOX_PORT), "GLOO_SOCKET_IFNAME": "eth1"}
    commands = [box.exec_argv(node, _command(script, arguments)) for node in spec.compute]
    return _result(commands, found, limit_s)


def under_muster(script: str, arguments: Sequence[str], ranks: int, *settings: str) -> Any:
    """Run ranks of a script as a program of `muster run`, with settings of its job; return what rank 0 wrote.

    Raises:
        SystemExit: the run failed.
    """
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = Path(folder).resolve() / "result.json"
        command = [
            sys.executable,
            "-m",
            "muster",
            "run",
            "-n",
            str(ranks),
            "--runs",
            folder,
            "-x",
            f"{RESULT}={result}",
        ]
        command += [word for each in (f"python={sys.executable}", *settings) for word in ("--set", each)]
        run = subprocess.run([*command, *_command(script, arguments)[1:]], capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {run.returncode}\n{run.stdout}{run.stderr}")
        return json.loads(result.read_text())


def tell(found: object) -> None:
    """Write what `under_muster` returns: on rank 0."""
    Path(os.environ[RESULT]).write_text(json.dumps(found))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Do something on all ranks of the default group; return CPU seconds of all and wall seconds of the slowest."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began, cpu_began = perf_counter(), process_time()
    work()
    wall, cpu = torch.tensor([perf_counter() - began]), torch.tensor([process_time() - cpu_began])
    dist.all_reduce(cpu)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    return cpu.item(), wall.item()


def _command(script: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, str(Path(script).resolve()), "--rank", *arguments]


def _result(commands: Sequence[list[str]], found: Mapping[str, str], limit_s: float) -> Any:
    common = {**os.environ, **QUIET, **found, "WORLD_SIZE": str(len(commands))}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env={**common, "RANK": str(rank)})
        for rank, command in enumerate(commands)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=limit_s)
        codes = [process.wait(30) for process in ranks]
    finally:
        for process in ranks:
            process.kill()  # nothing, where it has ended
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return json.loads(out)
