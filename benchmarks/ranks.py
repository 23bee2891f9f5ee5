"""New ranks that call a function of a benchmark, with the same settings in every one of them.

    found = on_ranks(measure, 4, steps=3)               measure(steps=3) on 4 gloo ranks; what rank 0 returned
    with place(args.ranks, args.rate) as where: ...     ranks of the loopback, or one in each node of a box
    for said in hear(measure, gpus, limit_s=60.0): ...  one a GPU; what rank 0 says, line by line

A rank finds itself by the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as under torchrun. It computes on
one thread, as the launcher's ranks do where they share cores.
"""

import contextlib
import importlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from harness import command

if TYPE_CHECKING:
    from muster.cloudlab.box.control import Box

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900.0
RESULT = "BENCHMARK_RESULT"  # the file that rank 0 writes, under muster run
BOX_PORT = 29411  # of the master: a fresh box has no other
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}  # the box has no name server: torch warns of that


@contextlib.contextmanager
def place(ranks: int | None, rate: str = "", nodes: int = 4) -> "Iterator[int | Box]":
    """Enter where ranks run: so many on the loopback, or one in each node of a new box with links of this speed."""
    if ranks:
        yield ranks
        return
    from muster.cloudlab.box.control import box_up
    from muster.cloudlab.box.spec import BoxSpec, parse_rate

    with box_up(BoxSpec(name=f"bench{os.getpid()}", nodes=nodes, rate=parse_rate(rate))) as box:
        yield box


def on_ranks(
    measure: Callable[..., Any], where: "int | Box", /, *, limit_s: float = LIMIT_S, before: str = "", **settings: Any
) -> Any:
    """Call a function on new ranks, in a gloo group of all; return what it returned on rank 0, as JSON keeps it.

    `before` names a function of the same script that every rank calls before it joins the group.

    Raises:
        SystemExit: a rank failed.
    """
    argv = _argv(measure, settings, before or "-")
    if isinstance(where, int):
        ranks = _start([argv] * where, _loopback())
    else:
        spec = where.state.spec
        found = {"MASTER_ADDR": spec.address("node0"), "MASTER_PORT": str(BOX_PORT), "GLOO_SOCKET_IFNAME": "eth1"}
        ranks = _start([where.exec_argv(node, argv) for node in spec.compute], found)
    try:
        out, _ = ranks[0].communicate(timeout=limit_s)
        codes = [process.wait(30) for process in ranks]
    finally:
        for process in ranks:
            process.kill()  # nothing, where it has ended
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")
    return json.loads(out)


def under_muster(measure: Callable[..., Any], ranks: int, /, *job: str, **settings: Any) -> Any:
    """Do as `on_ranks` with a program of `muster run`; `job` are settings of the job.

    Raises:
        SystemExit: the run failed.
    """
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = Path(folder).resolve() / "result.json"
        argv = [sys.executable, "-m", "muster", "run", "-n", str(ranks), "--runs", folder, "-x", f"{RESULT}={result}"]
        argv += [word for each in (f"python={sys.executable}", *job) for word in ("--set", each)]
        command([*argv, *_argv(measure, settings)[1:]])
        return json.loads(result.read_text())


def hear(
    measure: Callable[..., Any],
    gpus: int,
    /,
    *,
    limit_s: float,
    start_s: float = float("inf"),
    silence_s: float = float("inf"),
    patience_s: float = 20.0,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """Call a function on new ranks, one a GPU; yield the lines of JSON that rank 0 prints with `say`.

    The ranks join a group themselves; none is left behind. If one fails, or time runs out, the last line is "failed".
    `start_s` limits the time until the first line, `silence_s` the time between two.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ranks = _start([_argv(measure, settings, "alone")] * gpus, {**_loopback(), "PYTHONPATH": path}, quiet={})
    pipe = ranks[0].stdout
    assert pipe is not None
    began_s = time.monotonic()
    rest, ended, why, next_s = b"", False, "", began_s + start_s
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not ended and not why:
                if selector.select(1.0):
                    read = os.read(pipe.fileno(), 1 << 16)
                    ended = not read
                    *lines, rest = (rest + read).split(b"\n")
                    for line in lines:
                        next_s = time.monotonic() + silence_s
                        try:
                            said = json.loads(line)
                        except ValueError:  # NCCL's own talk
                            print(f"  | {line.decode(errors='replace').rstrip()}", flush=True)
                            continue
                        yield said
                if time.monotonic() > began_s + limit_s:
                    why = f"no end within {limit_s:.0f} s"
                elif time.monotonic() > next_s:
                    why = "no sign of life in time"
                elif any(rank.poll() for rank in ranks):
                    why = f"ranks ended with {[rank.poll() for rank in ranks]}"
        codes = _end(ranks, 0.0 if why else patience_s)
        if why or any(codes):
            yield {"say": "failed", "why": why or f"ranks ended with {codes}"}
    finally:
        _end(ranks, 0.0)
        pipe.close()


def say(what: str, **more: Any) -> None:
    """Print a line of JSON on rank 0, for `hear`."""
    if os.environ["RANK"] == "0":
        print(json.dumps({"say": what, **more}), flush=True)


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


def most(*values: float) -> list[float]:
    """Return the largest of all ranks' numbers, one by one."""
    import torch
    import torch.distributed as dist

    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return list(shared.tolist())


def _loopback() -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}


def _argv(measure: Callable[..., Any], settings: Mapping[str, Any], before: str = "-") -> list[str]:
    script = str(Path(measure.__code__.co_filename).resolve())
    return [sys.executable, str(Path(__file__).resolve()), script, measure.__name__, before, json.dumps(settings)]


def _start(
    commands: Sequence[list[str]], found: Mapping[str, str], quiet: Mapping[str, str] = QUIET
) -> "list[subprocess.Popen[bytes]]":
    common = {**os.environ, **quiet, **found, "WORLD_SIZE": str(len(commands))}
    return [
        subprocess.Popen(
            argv,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, argv in enumerate(commands)
    ]


def _end(ranks: "Sequence[subprocess.Popen[bytes]]", patience_s: float) -> list[int]:
    """Wait for ranks to end, then make them; return their codes."""
    deadline_s = time.monotonic() + patience_s
    for rank in ranks:
        try:
            rank.wait(max(deadline_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            rank.kill()
    return [rank.wait() for rank in ranks]


def rank_main(script: str, function: str, before: str, settings: str) -> None:
    """Be one rank."""
    sys.path.insert(0, str(Path(script).parent))
    module = importlib.import_module(Path(script).stem)
    measure = getattr(module, function)
    if before == "alone":
        measure(**json.loads(settings))
        return
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if before != "-":
        getattr(module, before)()
    dist.init_process_group("gloo")
    found = measure(**json.loads(settings))
    if dist.get_rank() == 0:
        text = json.dumps(found)
        if RESULT in os.environ:
            Path(os.environ[RESULT]).write_text(text)
        else:
            print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
